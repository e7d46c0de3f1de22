"""Where a report must not go: over anything that it was made from, and over what is no file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nanprobe.cli import main
from tests.test_cli import Engine, engine, one_error_line  # noqa: F401  # engine is a fixture


@pytest.fixture
def here(engine: Engine, tmp_path: Path) -> Path:  # noqa: F811  # the fixture
    """A folder with a config, a model and a sharded checkpoint, which is the current one."""
    (tmp_path / "toy.py").write_text("precious")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("precious")
    (tmp_path / "bad.pt").write_text("precious")
    index = {"metadata": {}, "weight_map": {"a": "one.json", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "one.json").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return tmp_path


def link(path: Path, target: str, kind: str) -> None:
    if kind == "symbolic":
        path.symlink_to(target)
    else:
        os.link(path.parent / target, path)


@pytest.mark.parametrize("kind", ["symbolic", "hard"])
@pytest.mark.parametrize(
    ("config", "target"),
    [
        ("model: {factory: toy.py:build}\n", "toy.py"),
        ("model: {factory: pack:build}\n", "pack/__init__.py"),
        ("model: {factory: other.py:build}\nloss: {factory: toy.py:loss}\n", "toy.py"),
        ("model: {factory: other.py:build}\n", "bad.pt"),
        ("model: {factory: other.py:build}\n", "nanprobe.yaml"),
        ("model: {factory: other.py:build}\ncheckpoint: model.safetensors.index.json\n", "one.json"),
        ("model: {factory: other.py:build}\ncheckpoint: .\n", "one.json"),
    ],
)
def test_no_input_is_replaced_through_a_link(
    here: Path, capsys: pytest.CaptureFixture[str], config: str, target: str, kind: str
) -> None:
    (here / "nanprobe.yaml").write_text(config + "batch: bad.pt\n")
    before = (here / target).read_bytes()
    link(here / "out.txt", target, kind)
    assert main(["replay", "-o", "out.txt"]) == 2
    one_error_line(capsys.readouterr().err)
    assert (here / target).read_bytes() == before


@pytest.mark.parametrize("command", ["replay --checkpoint {}", "scan-checkpoint {}", "diff-checkpoints {} {}"])
def test_no_shard_is_replaced(here: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    before = (here / "one.json").read_bytes()
    words = command.replace("{}", "model.safetensors.index.json").split()
    assert main([*words, "-o", "one.json"]) == 2
    assert "is an input of the same command" in one_error_line(capsys.readouterr().err)
    assert (here / "one.json").read_bytes() == before


def test_other_code_is_not_replaced_either(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "layers.py").write_text("precious")
    (here / "out.txt").symlink_to("layers.py")
    assert main(["replay", "-o", "out.txt"]) == 2
    assert "is a link to" in one_error_line(capsys.readouterr().err)


@pytest.mark.parametrize("target", ["/dev/null", "/dev/full", "/dev/stdout", "pipe", "out.json", "folder"])
def test_what_is_no_file_is_refused_and_stays(here: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
    os.mkfifo(here / "pipe")
    (here / "folder").mkdir()
    (here / "out.json").symlink_to(target)
    assert main(["replay", "-o", "out.json"]) == 2
    one_error_line(capsys.readouterr().err)
    assert os.readlink(here / "out.json") == target


@pytest.mark.parametrize("name", ["x" * 300 + ".json", "y" * 5000 + ".json", "a\0b.json", "a\ud800.json"])
def test_impossible_names(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["replay", "-o", name]) == 2
    assert len(one_error_line(capsys.readouterr().err)) < 1600


def test_the_longest_possible_name_and_a_dangling_link_are_written(here: Path) -> None:
    name = "x" * 250 + ".json"
    (here / "link.json").symlink_to("new.json")
    assert main(["replay", "-o", name, "-o", "link.json"]) == 1
    assert json.loads((here / name).read_text())["exit_code"] == 1
    assert (here / "link.json").is_symlink()
    assert json.loads((here / "new.json").read_text())["exit_code"] == 1


def test_the_verdict_is_told_where_only_a_file_holds_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["replay", "-o", "r.json"])
    verdict, wrote = capsys.readouterr().err.splitlines()
    assert "fp16 overflows in" in verdict
    assert wrote == "nanprobe: wrote r.json"
    main(["replay", "-o", "r.json", "--quiet"])
    assert capsys.readouterr().err == ""


def test_the_flags_that_beat_the_config_reach_the_report(
    engine: Engine,  # noqa: F811  # the fixture
    here: Path,
) -> None:
    words = ["--checkpoint", "w.pt", "--batch", "bad.pt", "--mode", "cast", "--autocast-policy", "cpu"]
    words += ["--attention", "math", "--loss-scale", "1024", "--device", "cpu", "--seed", "3"]
    words += ["--no-backward", "--trust-pickle"]
    main(["replay", *words])
    assert list(engine.calls[0]["overrides"]) == words
    main(["replay", "--loss-scale", "0.123456789"])
    assert list(engine.calls[1]["overrides"]) == ["--loss-scale", "0.123456789"]
    main(["replay"])
    assert list(engine.calls[2]["overrides"]) == []


@pytest.mark.parametrize(("word", "option"), [("a.yaml", "--config"), ("b.YML", "--config"), ("bad.pt", "--batch")])
def test_a_bare_path_names_the_option(here: Path, capsys: pytest.CaptureFixture[str], word: str, option: str) -> None:
    assert main(["replay", word]) == 2
    assert f"did you mean `{option} {word}`?" in one_error_line(capsys.readouterr().err)


@pytest.mark.parametrize("width", ["²", "9" * 6000, "-3", "0", "x"])
def test_a_width_that_is_none(here: Path, monkeypatch: pytest.MonkeyPatch, width: str) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert main(["replay"]) == 1
