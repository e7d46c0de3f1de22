"""The commands: exit codes, documents, patterns, baselines, several paths, saved reports."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import nanprobe
from nanprobe.cli import main
from nanprobe.errors import UsageError
from tests.scan.helpers import normal

NAN = math.nan


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.safetensors"
    save_file({"fc.weight": normal(8, 8), "fc.bias": torch.zeros(8)}, path)
    return path


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    weight = normal(8, 8)
    weight[1, 2] = NAN
    path = tmp_path / "bad.safetensors"
    save_file({"fc.weight": weight, "head.weight": torch.zeros(8, 8)}, path)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_exit_codes_follow_the_findings(good: Path, bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "scan-checkpoint", good)[0] == 0
    assert run(capsys, "scan-checkpoint", bad)[0] == 1
    assert run(capsys, "scan-checkpoint", bad, "--fail-on", "never")[0] == 0
    only_warnings = ("scan-checkpoint", bad, "--include", "head.*")
    assert run(capsys, *only_warnings)[0] == 0
    assert run(capsys, *only_warnings, "--fail-on", "warning")[0] == 1


def test_unusable_paths(good: Path, bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "scan-checkpoint", tmp_path / "missing.pt")
    assert (code, out) == (2, "")
    assert err.startswith("nanprobe: error: ")
    assert err.count("\n") == 1
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    assert run(capsys, "scan-checkpoint", text)[0] == 2
    (tmp_path / "empty").mkdir()
    assert run(capsys, "scan-checkpoint", tmp_path / "empty")[0] == 2
    code, out, err = run(capsys, "scan-checkpoint", tmp_path / "missing.pt", "--json")
    assert code == json.loads(out)["exit_code"] == 2
    assert "missing.pt" in json.loads(out)["error"]


def test_one_unusable_path_of_several(good: Path, bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "scan-checkpoint", bad, bad.parent / "missing.pt", "--json")
    assert err.startswith("nanprobe: error: ")
    assert err.count("\n") == 1
    document = json.loads(out)
    assert code == document["exit_code"] == 2
    assert "missing.pt" in document["error"]
    assert [finding["rule"] for finding in document["findings"]] == ["nonfinite-weight", "all-zero"]


def test_a_damaged_file_is_a_finding(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = good.parent / "cut.safetensors"
    cut.write_bytes(good.read_bytes()[:-40])
    code, out, _ = run(capsys, "scan-checkpoint", cut, "--json")
    assert code == 1
    assert "truncated-file" in [finding["rule"] for finding in json.loads(out)["findings"]]
    cut.write_bytes(b"")
    assert run(capsys, "scan-checkpoint", cut)[0] == 1


def test_the_document(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "scan-checkpoint", bad, "--json", "--tensors")
    document = json.loads(out)
    assert err == ""
    assert (code, document["command"], document["schema_version"]) == (1, "scan-checkpoint", 1)
    summary = document["summary"]
    assert (summary["files"], summary["tensors"], summary["elements"], summary["bytes"]) == (1, 2, 128, 512)
    assert summary["formats"] == ["safetensors"]
    assert (summary["scanned"], summary["skipped"], summary["unreadable"]) == (2, 0, 0)
    finding = document["findings"][0]
    assert set(finding) >= {"rule", "severity", "file", "tensor", "dtype", "shape", "evidence", "message", "remedy"}
    assert finding["evidence"]["first_index"] == [1, 2]
    rows = {row["tensor"]: row for row in document["tensors"]}
    assert rows["fc.weight"]["nan"] == 1
    assert rows["fc.weight"]["role"] == "weight"
    assert rows["head.weight"]["zero"] == 64
    assert set(rows["fc.weight"]) >= {
        "tensor", "file", "dtype", "shape", "elements", "nan", "posinf", "neginf", "zero", "subnormal", "absmax", "min",
        "max", "mean", "rms", "role",
    }  # fmt: skip


def test_tensors_are_listed_only_when_asked_for(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(run(capsys, "scan-checkpoint", bad, "--json")[1])["tensors"] == []


def test_patterns(bad: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "scan-checkpoint", bad, "--exclude", "fc.*", "--json")
    document = json.loads(out)
    assert (code, document["summary"]["scanned"], document["summary"]["skipped"]) == (0, 1, 1)
    code, _, err = run(capsys, "scan-checkpoint", bad, "--include", "nothing*")
    assert code == 2
    assert "nothing was scanned" in err


def test_a_pattern_that_matches_nothing_is_no_clean_scan_even_beside_plain_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "state.pt"
    torch.save({"model": {"fc.weight": torch.full((2, 2), math.nan)}, "epoch": 3, "lr": 0.1}, path)
    assert run(capsys, "scan-checkpoint", path, "--include", "fc*")[0] == 1
    code, _, err = run(capsys, "scan-checkpoint", path, "--include", "cf*")
    assert code == 2
    assert "left by --include" in err


def test_a_file_of_which_nothing_could_be_read_is_no_clean_scan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sealed.pt"
    torch.save({"fc.weight": torch.zeros(2)}, path)
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02")
    assert b"data.pkl" in content[at : at + 80]
    content[at + 8] |= 1  # the flag of an encrypted member
    path.write_bytes(content)
    code, out, err = run(capsys, "scan-checkpoint", path)
    assert (code, out) == (2, "")
    assert "is encrypted" in err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 200_000, "is no JSON"),
        ("9" * 6000, "is no JSON"),
        ("{}", "is no nanprobe baseline"),
        (None, "is a device"),
    ],
)
def test_a_baseline_that_is_none(
    bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    baseline = tmp_path / "known.json" if content is not None else Path(os.devnull)
    if content is not None:
        baseline.write_text(content)
    code, _, err = run(capsys, "scan-checkpoint", bad, "--baseline", baseline)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1


def test_a_baseline_is_read_up_to_a_limit(
    bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanprobe.scan.baseline._MOST_BYTES", 100)
    baseline = tmp_path / "known.json"
    baseline.write_text(" " * 101)
    code, _, err = run(capsys, "scan-checkpoint", bad, "--baseline", baseline)
    assert (code, "more than 100 bytes" in err) == (2, True)


def test_a_baseline(bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = tmp_path / "known.json"
    assert run(capsys, "scan-checkpoint", bad, "--baseline", baseline)[0] == 2
    assert run(capsys, "scan-checkpoint", bad, "--update-baseline")[0] == 2
    code, _, err = run(capsys, "scan-checkpoint", bad, "--baseline", baseline, "--update-baseline")
    assert code == 0
    assert f"wrote {baseline}" in err
    code, out, _ = run(capsys, "scan-checkpoint", bad, "--baseline", baseline, "--json", "--fail-on", "warning")
    assert code == 0
    assert [finding["known"] for finding in json.loads(out)["findings"]] == [True, True]
    weight = normal(8, 8)
    weight[0, 0] = NAN
    save_file({"fc.weight": weight, "new.weight": weight.clone()}, bad)
    code, out, _ = run(capsys, "scan-checkpoint", bad, "--baseline", baseline, "--json")
    assert code == 1
    known = {finding["tensor"]: finding["known"] for finding in json.loads(out)["findings"]}
    assert known == {"fc.weight": True, "new.weight": False}


def test_a_baseline_holds_in_another_folder(bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = tmp_path / "known.json"
    run(capsys, "scan-checkpoint", bad, "--baseline", baseline, "--update-baseline")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    other = bad.rename(moved / bad.name)
    assert run(capsys, "scan-checkpoint", other, "--baseline", baseline)[0] == 0
    damaged = tmp_path / "damaged.json"
    damaged.write_text("[]")
    assert run(capsys, "scan-checkpoint", other, "--baseline", damaged)[0] == 2


def test_a_saved_scan_is_rendered_again(bad: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "scan.json"
    run(capsys, "scan-checkpoint", bad, "--tensors", "-o", saved)
    for form in ("table", "markdown", "json"):
        _, direct, _ = run(capsys, "scan-checkpoint", bad, "--tensors", "--format", form)
        code, again, _ = run(capsys, "render", saved, "--format", form)
        assert code == 1
        assert "nonfinite-weight" in again
        assert "fc.weight" in again
        assert len(direct.splitlines()) == len(again.splitlines())
    report = nanprobe.load_report(saved)
    again_scanned = nanprobe.scan_checkpoint(bad, tensors=True)
    assert (report.findings, report.record.tensors) == (again_scanned.findings, again_scanned.record.tensors)
    assert report.verdict is None
    assert report.first_bad is None


def test_names_of_a_file_cannot_act_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.safetensors"
    save_file({"\x1b[31mred<script>|`x`": torch.full((4, 4), NAN)}, path)
    assert "\x1b" not in run(capsys, "scan-checkpoint", path, "--tensors")[1]
    assert "\\|" in run(capsys, "scan-checkpoint", path, "--tensors", "--format", "markdown")[1]


def test_thousands_of_findings_stay_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "many.safetensors"
    save_file({f"layers.{at}.weight": torch.full((2, 2), NAN) for at in range(3000)}, path)
    code, out, _ = run(capsys, "scan-checkpoint", path)
    assert code == 1
    assert "3,000 tensors" in out
    assert "and 2,995 more" in out
    assert len(out.splitlines()) < 40


def test_a_cast_that_does_not_exist(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "scan-checkpoint", good, "--cast", "fp61")
    assert code == 2
    assert "did you mean `fp16`" in err


def test_the_model_of_a_config(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\ndef build():\n    return torch.nn.ModuleDict({'fc': torch.nn.Linear(9, 8)})\n"
    )
    (tmp_path / "nanprobe.yaml").write_text("model: {factory: net.py:build}\n")
    code, out, _ = run(capsys, "scan-checkpoint", good, "--config", tmp_path / "nanprobe.yaml", "--json")
    assert code == 1
    assert [finding["rule"] for finding in json.loads(out)["findings"]] == ["shape-mismatch"]


def test_a_report_is_not_written_over_the_checkpoint(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = good.read_bytes()
    link = good.with_suffix(".json")
    os.link(good, link)
    assert run(capsys, "scan-checkpoint", good, "-o", link)[0] == 2
    assert good.read_bytes() == before


def test_python_interface(good: Path, bad: Path) -> None:
    report = nanprobe.scan_checkpoint(bad)
    assert report.exit_code == 1
    assert report.exit_code_for("never") == 0
    assert report.findings[0].rule == "nonfinite-weight"
    assert json.loads(report.to_json())["exit_code"] == 1
    assert "fc.weight" in report.render("markdown")
    assert nanprobe.scan_checkpoint([good, bad], cast="fp16").record.summary.files == 2
    with pytest.raises(UsageError, match="does not exist"):
        nanprobe.scan_checkpoint(good.parent / "missing.pt")
    with pytest.raises(UsageError, match="at least one path"):
        nanprobe.scan_checkpoint([])
