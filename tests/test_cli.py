"""The command line with the engine replaced by a stub: options, outputs, exit codes, and how errors end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanprobe.cli import main
from nanprobe.errors import IncompleteError, Interrupted, UsageError
from nanprobe.records import ReplayReport
from nanprobe.serialize import to_json
from tests.render.reports import clean, fp16_overflow, lane_that_raised

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "model: {factory: toy.py:build}\nbatch: bad.pt\n"


class Engine:
    """Stands in for the pipeline: returns a report, or does what ``act`` does, and keeps what it was called with."""

    def __init__(self) -> None:
        self.report: ReplayReport = fp16_overflow()
        self.act: Callable[[Any], None] | None = None
        self.calls: list[dict[str, Any]] = []

    def replay_command(self, config: Any, **options: Any) -> ReplayReport:
        self.calls.append({"config": config, **options})
        if self.act is not None:
            self.act(options["progress"])
        return self.report


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Engine:
    stub = Engine()
    module = types.ModuleType("nanprobe.pipeline")
    module.replay_command = stub.replay_command  # type: ignore[attr-defined]  # the stub's only function
    monkeypatch.setitem(sys.modules, "nanprobe.pipeline", module)
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "nanprobe.yaml").write_text(CONFIG)
    return stub


def raise_(error: BaseException) -> Callable[[Any], None]:
    def act(_: Any) -> None:
        raise error

    return act


def void(_: Any) -> None:
    """Return nothing."""


def one_error_line(stderr: str) -> str:
    lines = stderr.splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("nanprobe: error: ")
    return lines[0]


def test_the_report_goes_to_stdout_and_findings_give_1(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare-precisions"]) == 1
    out, err = capsys.readouterr()
    assert "fp16" in out
    assert "\x1b" not in out
    assert err == ""
    (call,) = engine.calls
    assert call["command"] == "compare-precisions"
    assert call["precisions"] == ("fp32", "fp16", "bf16")
    assert call["local_error"] is True
    assert call["trust_pickle"] is False
    assert call["started"] > 0
    assert call["import_seconds"] >= 0


def test_a_clean_report_gives_0(engine: Engine) -> None:
    engine.report = clean()
    assert main(["replay"]) == 0


@pytest.mark.parametrize(
    ("arguments", "precisions"),
    [
        (["replay"], ("fp32", "fp16")),
        (["replay", "--dtype", "bf16"], ("fp32", "bf16")),
        (["replay", "--dtype", "fp32"], ("fp64", "fp32")),
        (["compare-precisions", "--dtypes", "bf16"], ("fp32", "bf16")),
        (["compare-precisions", "--dtypes", "bf16, fp32,bf16,fp16"], ("fp32", "bf16", "fp16")),
    ],
)
def test_precisions(engine: Engine, arguments: list[str], precisions: tuple[str, ...]) -> None:
    main(arguments)
    assert engine.calls[0]["precisions"] == precisions


def test_flags_reach_the_config(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("model: {factory: a:b}\nmode: autocast\n")
    arguments = (
        "replay --config other.yaml --checkpoint w.pt --batch b.pt --mode cast --autocast-policy cpu --attention math "
        "--backward --loss-scale 1e3 --device cuda:1 --seed 5 --no-trace --no-local-error --trust-pickle --dtype bf16"
    )
    main(arguments.split())
    (call,) = engine.calls
    config = call["config"]
    assert config.checkpoint.given == "w.pt"
    assert config.batch.given == "b.pt"
    settings = config.settings
    assert (settings.mode, settings.autocast_policy, settings.backward, settings.loss_scale) == (
        "cast",
        "cpu",
        True,
        1000.0,
    )
    assert (settings.device, settings.seed, settings.attention) == ("cuda:1", 5, "math")
    assert call["local_error"] is False
    assert call["trust_pickle"] is True
    main(["replay", "--no-backward", "--batch", "b.pt"])
    assert engine.calls[1]["config"].settings.backward is False


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ("replay --dtype fp61", ["--dtype", "fp61", "`fp16`"]),
        ("replay --dtype fp8-e4m", ["--dtype", "`fp8-e4m3`"]),
        ("replay --dtype int8", ["--dtype", "`fp32`", "`tf32`", "`fp8-e4m3`", "`fp8-e5m2`"]),
        ("replay --fp8-scaling tensors", ["--fp8-scaling", "tensor", "none"]),
        ("compare-precisions --dtypes fp32", ["--dtypes", "at least one"]),
        ("compare-precisions --dtypes fp32,half", ["--dtypes", "'half'"]),
        ("replay --mode cats", ["--mode", "`cast`"]),
        ("replay --device tpu", ["--device", "cuda:N"]),
        ("replay --loss-scale much", ["--loss-scale", "a number, got 'much'"]),
        ("replay --loss-scale -1", ["--loss-scale", "above 0"]),
        ("replay --loss-scale nan", ["--loss-scale", "finite"]),
        ("replay --seed 1.5", ["--seed", "an integer, got '1.5'"]),
        ("replay --seed -3", ["--seed"]),
        ("replay --nope", ["--nope"]),
        ("replay --config", ["--config"]),
        ("replay extra", ["extra"]),
        ("replay --format html", ["html is not built yet", "table, json, markdown"]),
        ("replay --format jsn", ["--format jsn", "`json`"]),
        ("replay --format table --json", ["--json", "contradict"]),
        ("replay -o report.html", ["report.html", "html is not built yet"]),
        ("replay -o report.sarif", ["sarif is not built yet"]),
        ("replay -o report.xml", ["junit is not built yet"]),
        ("replay -o report.pdf", ["report.pdf", "extension .pdf"]),
        ("replay -o report", ["no extension"]),
        ("replay -o none/report.json", ["no folder"]),
        ("replay -o a.json -o ./a.json", ["named twice"]),
        ("replay --fail-on errors", ["--fail-on", "`error`"]),
        ("replay --color alway", ["--color", "`always`"]),
        ("replay --config none.yaml", ["none.yaml", "no such config file"]),
        ("repaly", ["no such command 'repaly'", "`replay`"]),
        ("render", ["REPORT.json"]),
        ("render none.json", ["none.json"]),
    ],
)
def test_a_mistake_on_the_command_line(
    engine: Engine, capsys: pytest.CaptureFixture[str], arguments: str, parts: list[str]
) -> None:
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    line = one_error_line(err)
    for part in parts:
        assert part in line
    assert out == "" or (json.loads(out)["exit_code"] == 2 and "--json" in arguments)
    assert engine.calls == []


def test_no_config_and_no_batch(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nanprobe.yaml").write_text("model: {factory: a:b}\n")
    assert main(["replay"]) == 2
    assert "no batch" in one_error_line(capsys.readouterr().err)
    (tmp_path / "nanprobe.yaml").unlink()
    assert main(["replay"]) == 2
    assert "no nanprobe.yaml or nanprobe.yml" in one_error_line(capsys.readouterr().err)


@pytest.mark.parametrize("command", ["scan-batch", "isolate", "remedy"])
def test_what_is_not_built_yet_is_not_offered(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "path", "--whatever"]) == 2
    out, err = capsys.readouterr()
    assert err == f"nanprobe: {command} is not built yet\n"
    assert out == ""
    assert main(["--help"]) == 0
    assert command not in capsys.readouterr().out
    assert main([command, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == f"{command} is not built yet"


@pytest.mark.parametrize(
    ("error", "code", "part"),
    [
        (UsageError("bad.pt: no such file"), 2, "bad.pt: no such file"),
        (IncompleteError("the FP32 reference raised"), 3, "the FP32 reference raised"),
        (MemoryError(), 3, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 5 bytes"), 3, "out of memory"),
        (RuntimeError("something else\nentirely"), 3, "internal error: RuntimeError: something else entirely"),
        (RecursionError("too deep"), 3, "internal error"),
        (SystemExit(0), 3, "the replayed code ended the program: sys.exit(0)"),
        (UsageError("a \x1b[31mred\x1b[0m name"), 2, r"a \x1b[31mred\x1b[0m name"),
    ],
)
def test_an_error_is_one_line_and_its_code(
    engine: Engine, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, part: str
) -> None:
    engine.act = raise_(error)
    assert main(["replay"]) == code
    out, err = capsys.readouterr()
    assert part in one_error_line(err)
    assert out == ""
    assert main(["replay", "--json"]) == code
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert part in document["error"]
    assert document["exit_code"] == code
    assert document["command"] == "replay"
    one_error_line(err)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("interrupted")])
def test_an_interrupt_is_130(engine: Engine, capsys: pytest.CaptureFixture[str], error: BaseException) -> None:
    engine.act = raise_(error)
    assert main(["replay", "-o", "report.json"]) == 130
    assert capsys.readouterr() == ("", "nanprobe: interrupted\n")
    assert not Path("report.json").exists()


def test_the_traceback_is_shown_with_debug_only(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.act = raise_(UsageError("wrong"))
    assert main(["replay", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("nanprobe: error: wrong\n")


def test_json_is_one_document_whatever_the_model_prints(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.act = lambda _: void(sys.stdout.write("loading...\n"))
    for arguments in (["replay", "--json"], ["replay", "--format", "json"], ["replay", "--format=json"]):
        assert main(arguments) == 1
        out, err = capsys.readouterr()
        assert json.loads(out)["exit_code"] == 1
        assert err == "loading...\n"


def test_files_replace_stdout_unless_it_is_asked_for(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "-o", "a.json", "-o", "b.md", "--output", "c.txt"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    verdict, *wrote = err.splitlines()
    assert verdict.startswith("nanprobe: fp16 overflows in ")
    assert wrote == ["nanprobe: wrote a.json", "nanprobe: wrote b.md", "nanprobe: wrote c.txt"]
    assert json.loads(Path("a.json").read_text())["schema_version"] == 1
    assert "|" in Path("b.md").read_text()
    assert "\x1b" not in Path("c.txt").read_text()
    assert sorted(p.name for p in Path().iterdir()) == ["a.json", "b.md", "c.txt", "nanprobe.yaml"]
    main(["replay", "-o", "a.json", "-o", "-"])
    assert capsys.readouterr() == (Path("c.txt").read_text(), "nanprobe: wrote a.json\n")
    main(["replay", "-o", "b.md", "--json", "--quiet"])
    out, err = capsys.readouterr()
    assert json.loads(out)["exit_code"] == 1
    assert err == ""


def test_an_input_is_never_overwritten(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "batch.json").write_text("precious")
    os.link(tmp_path / "batch.json", tmp_path / "linked.json")
    for name in ("batch.json", "linked.json"):
        assert main(["replay", "--batch", "batch.json", "-o", name]) == 2
        assert "is an input" in one_error_line(capsys.readouterr().err)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "index.json").write_text("precious")
    assert main(["replay", "--checkpoint", "weights", "-o", "weights/index.json"]) == 2
    assert "belongs to weights" in one_error_line(capsys.readouterr().err)
    saved = tmp_path / "report.json"
    saved.write_text(to_json(clean()))
    assert main(["render", "report.json", "-o", "report.json"]) == 2
    assert saved.read_text() == to_json(clean())
    assert (tmp_path / "batch.json").read_text() == "precious"
    assert engine.calls == []


def test_a_file_is_replaced_whole_and_keeps_its_permissions(engine: Engine, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    target.write_text("old")
    target.chmod(0o640)
    (tmp_path / "link.json").symlink_to(target)
    main(["replay", "-o", "link.json"])
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads(target.read_text())["exit_code"] == 1
    assert target.stat().st_mode & 0o777 == 0o640


def test_nothing_half_written_remains(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["replay", "-o", "report.json"]) == 2
    assert "No space left on device" in one_error_line(capsys.readouterr().err)
    assert [p.name for p in tmp_path.iterdir()] == ["nanprobe.yaml"]


@pytest.mark.parametrize(("fail_on", "code"), [("error", 1), ("warning", 1), ("never", 0)])
def test_fail_on_decides_code_and_document_alike(
    engine: Engine, capsys: pytest.CaptureFixture[str], fail_on: str, code: int
) -> None:
    assert main(["replay", "--json", "--fail-on", fail_on]) == code
    assert json.loads(capsys.readouterr().out)["exit_code"] == code


def test_a_replay_that_could_not_complete_stays_3(engine: Engine) -> None:
    import dataclasses

    engine.report = dataclasses.replace(lane_that_raised(), exit_code=3)
    assert main(["replay", "--fail-on", "never"]) == 3


def test_notes_go_to_stderr_unless_quiet(engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nanprobe.yaml").write_text(
        CONFIG.replace("{factory: toy.py:build}", "{factory: toy.py:build, kwargs: {bias: off}}")
    )
    engine.act = lambda progress: progress.note("attention: \x1b[0m weights")
    main(["replay"])
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2
    assert "model.kwargs.bias" in err[0]
    assert err[1] == r"nanprobe: note: attention: \x1b[0m weights"
    main(["replay", "--quiet"])
    assert capsys.readouterr().err == ""


def test_show_config_runs_nothing(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--show-config", "--seed", "9"]) == 0
    out, err = capsys.readouterr()
    assert "seed: 9  # --seed" in out
    assert "factory: toy.py:build" in out
    assert err == ""
    assert main(["compare-precisions", "--show-config", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["config"]["mode"] == "autocast"
    assert document["origins"]["batch"] == "nanprobe.yaml:2"
    assert engine.calls == []


@pytest.mark.parametrize("arguments", [[], ["--format", "json"], ["--format", "markdown"], ["--verbose"]])
def test_render_shows_a_saved_report_again(
    engine: Engine, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert main(["replay", "-o", "report.json", *arguments, "-o", "-"]) == 1
    first = capsys.readouterr().out
    assert main(["render", "report.json", *arguments]) == 1
    assert capsys.readouterr().out == first
    assert main(["render", "report.json", "--fail-on", "never"]) == 0


def test_colour(engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def colored(*arguments: str) -> bool:
        main(["replay", *arguments])
        return "\x1b[" in capsys.readouterr().out

    assert not colored()
    assert colored("--color", "always")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert colored()
    assert not colored("--color", "never")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colored()


def test_the_width_that_the_environment_asks_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(["replay"])
    narrow = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "160")
    main(["replay"])
    wide = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80
    assert max(map(len, wide.splitlines())) > 80


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "compare-precisions" in capsys.readouterr().out


def test_help_carries_no_escape_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("FORCE_COLOR", "1")
    for arguments in (["--help"], ["replay", "--help"], ["render", "-h"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert "Usage: nanprobe" in out
        assert "\x1b" not in out


STUBBED = """
import sys, types
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.render.reports import fp16_overflow
stub = types.ModuleType("nanprobe.pipeline")
def replay_command(config, **options):
    {act}
    return fp16_overflow()
stub.replay_command = replay_command
sys.modules["nanprobe.pipeline"] = stub
from nanprobe.__main__ import entry_point
entry_point()
"""


def start(tmp_path: Path, arguments: list[str], act: str = "pass", **options: Any) -> subprocess.Popen[str]:
    """Start the program with the stub in a process of its own."""
    (tmp_path / "nanprobe.yaml").write_text(CONFIG)
    code = STUBBED.format(root=str(ROOT), act=act)
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, text=True, stderr=subprocess.PIPE, **options
    )


def test_a_reader_that_left_does_not_change_the_code(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with start(tmp_path, ["replay", "--verbose"], stdout=writing) as process:
        os.close(writing)
        _, err = process.communicate()
    assert (process.returncode, err) == (1, "")


def test_a_reader_that_left_help(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with start(tmp_path, ["--help"], stdout=writing) as process:
        os.close(writing)
        _, err = process.communicate()
    assert (process.returncode, err) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_full_disk_is_3(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full, start(tmp_path, ["replay"], stdout=full) as process:
        _, err = process.communicate()
    assert process.returncode == 3
    assert "cannot write to stdout" in one_error_line(err)


def test_ctrl_c_in_the_middle_of_a_run(tmp_path: Path) -> None:
    act = "import os, signal; os.kill(os.getpid(), signal.SIGINT); signal.pause()"
    with start(tmp_path, ["replay", "-o", "report.json"], act, stdout=subprocess.PIPE) as process:
        out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "nanprobe: interrupted\n")
    assert [p.name for p in tmp_path.iterdir()] == ["nanprobe.yaml"]


def test_an_encoding_that_cannot_show_everything(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with start(tmp_path, ["replay"], stdout=subprocess.PIPE, env=environment) as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (1, "")
    assert "fp16" in out


def test_closed_streams(tmp_path: Path) -> None:
    (tmp_path / "nanprobe.yaml").write_text(CONFIG)
    (tmp_path / "program.py").write_text(STUBBED.format(root=str(ROOT), act="pass"))
    command = f"exec {sys.executable} program.py replay -o report.json -o - >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=tmp_path, check=False).returncode == 1
    assert (tmp_path / "report.json").exists()
