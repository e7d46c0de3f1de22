"""Stdout is the report's alone and the process ends when the report is out, whatever the replayed code does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanprobe._console.user_code import user_code
from nanprobe.cli import main
from tests.test_cli import Engine, engine, one_error_line, raise_, start  # noqa: F401  # engine is a fixture


class Odd(BaseException):
    """No Exception, and unable to say what it is."""

    def __str__(self) -> str:
        raise ValueError("no")


class Unspeakable(RuntimeError):
    """An error whose message raises."""

    def __str__(self) -> str:
        raise ValueError("no")


ACTS = {
    "the descriptor": "import os; os.write(1, b'noise\\n')",
    "the first stdout": "sys.__stdout__.write('noise\\n')",
    "a child process": "import subprocess; subprocess.run(['echo', 'noise'], check=True)",
    "a closed stdout": "os = __import__('os'); os.write(1, b'noise\\n'); os.close(1); sys.__stdout__.close()",
    "another stdout": "print('noise'); sys.stdout = open(os.devnull, 'w') if 'os' in globals() else None",
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_stdout_is_one_document_whatever_writes_to_it(tmp_path: Path, act: str) -> None:
    with start(tmp_path, ["replay", "--json"], act, stdout=subprocess.PIPE) as process:
        out, err = process.communicate()
    assert process.returncode == 1
    assert json.loads(out)["exit_code"] == 1
    assert err == "noise\n"


def test_quiet_silences_what_libraries_say(tmp_path: Path) -> None:
    act = "import os; os.write(2, b'Loading weights\\n'); print('noise', file=sys.stderr)"
    with start(tmp_path, ["replay", "--json", "--quiet"], act, stdout=subprocess.PIPE) as process:
        out, err = process.communicate()
    assert json.loads(out)["exit_code"] == 1
    assert err == ""


def test_quiet_still_says_what_went_wrong(tmp_path: Path) -> None:
    with start(tmp_path, ["replay", "--quiet"], "raise GeneratorExit('gone')", stdout=subprocess.PIPE) as process:
        out, err = process.communicate()
    assert (process.returncode, out) == (3, "")
    assert one_error_line(err) == "nanprobe: error: the replayed code raised GeneratorExit: gone"


def test_a_thread_of_the_model_does_not_keep_the_process(tmp_path: Path) -> None:
    act = "import threading; threading.Thread(target=threading.Event().wait).start()"
    with start(tmp_path, ["replay", "--json"], act, stdout=subprocess.PIPE) as process:
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert json.loads(out)["exit_code"] == 1


def test_a_forked_copy_writes_no_report(tmp_path: Path) -> None:
    act = "import os; child = os.fork(); child and os.waitpid(child, 0)"
    with start(tmp_path, ["replay", "--json"], act, stdout=subprocess.PIPE) as process:
        out, _ = process.communicate()
    assert json.loads(out)["exit_code"] == 1


def test_the_working_directory_is_restored(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with start(tmp_path, ["replay", "-o", "r.json"], "import os; os.chdir('elsewhere')", stdout=-1) as process:
        process.communicate()
    assert (tmp_path / "r.json").exists()


def test_streams_that_the_code_closed_or_replaced_are_back(capfd: pytest.CaptureFixture[str]) -> None:
    out, err = sys.stdout, sys.stderr
    with user_code():
        os.write(1, b"through the descriptor\n")
        sys.stdout = None
    assert (sys.stdout, sys.stderr) == (out, err)
    os.write(1, b"report\n")
    assert capfd.readouterr() == ("report\n", "through the descriptor\n")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (GeneratorExit(), "the replayed code raised GeneratorExit"),
        (Odd(), "the replayed code raised Odd"),
        (Unspeakable(), "internal error: Unspeakable (--debug shows the traceback)"),
        (SystemExit(Odd()), "the replayed code ended the program: sys.exit(Odd())"),
    ],
)
def test_no_exception_gets_out(
    engine: Engine,  # noqa: F811  # the fixture
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    line: str,
) -> None:
    engine.act = raise_(error)
    assert main(["replay"]) == 3
    assert one_error_line(capsys.readouterr().err) == f"nanprobe: error: {line}"
    assert main(["replay", "--debug"]) == 3


EARLY = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            os.kill(os.getpid(), signal.SIGINT)
            {then}
sys.meta_path.insert(0, Finder())
sys.argv = ["nanprobe", "replay"]
from nanprobe.__main__ import entry_point
entry_point()
"""


@pytest.mark.parametrize("at", ["nanprobe.cli", "typer", "nanprobe.config", "nanprobe.pipeline", "torch"])
@pytest.mark.parametrize("then", ["pass", "raise ImportError('half loaded')"])
def test_ctrl_c_while_modules_are_imported(tmp_path: Path, at: str, then: str) -> None:
    (tmp_path / "nanprobe.yaml").write_text("model: {factory: toy.py:build}\nbatch: bad.pt\n")
    code = EARLY.format(at=at, then=then)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "nanprobe: interrupted\n")


def test_ctrl_c_that_the_code_swallowed_still_ends_the_run(tmp_path: Path) -> None:
    act = (
        "import os, signal\n"
        "    try: os.kill(os.getpid(), signal.SIGINT); signal.pause()\n"
        "    except KeyboardInterrupt: raise RuntimeError('swallowed')"
    )
    with start(tmp_path, ["replay"], act, stdout=subprocess.PIPE) as process:
        out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "nanprobe: interrupted\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_help_on_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full, start(tmp_path, ["--help"], stdout=full) as process:
        _, err = process.communicate()
    assert process.returncode == 3
    assert "cannot write to stdout" in one_error_line(err)
