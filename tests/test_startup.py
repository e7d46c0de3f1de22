"""What must answer at once imports no torch: help, version, mistakes in flags or config, and rendering."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nanprobe.serialize import to_json
from nanprobe.version import __version__
from tests.render.reports import fp16_overflow

PROBE = """
import sys
from nanprobe.cli import main
code = main(sys.argv[1:])
heavy = sorted({"torch", "numpy", "transformers", "safetensors", "rich"} & set(sys.modules))
print("heavy:", heavy, file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["replay", "--help"], 0),
        ([], 2),
        (["replay"], 2),
        (["replay", "--config", "bad.yaml"], 2),
        (["replay", "--nope"], 2),
        (["compare-precisions", "--config", "good.yaml", "--mode", "cats"], 2),
        (["compare-precisions", "--config", "good.yaml", "--show-config"], 0),
        (["compare-precisions", "--config", "good.yaml"], 2),
        (["scan-checkpoint", "x"], 2),
        (["render", "report.json"], 1),
        (["render", "report.json", "--format", "markdown"], 1),
        (["render", "report.json", "--json"], 1),
        (["explain"], 0),
        (["explain", "overflow"], 0),
        (["explain", "overfow"], 2),
    ],
)
def test_no_torch_is_imported(tmp_path: Path, arguments: list[str], code: int) -> None:
    (tmp_path / "bad.yaml").write_text("modle: x\n")
    (tmp_path / "good.yaml").write_text("model: {factory: a:b}\n")
    (tmp_path / "report.json").write_text(to_json(fp16_overflow()))
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    # Counting what is in a checkpoint needs NumPy, and nothing heavier.
    heavy = ["numpy"] if arguments[:1] == ["scan-checkpoint"] else []
    assert done.stderr.splitlines()[-1] == f"heavy: {heavy}"


def test_importing_the_package_imports_no_torch() -> None:
    code = "import nanprobe, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_module_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "nanprobe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"nanprobe {__version__}\n"
