"""Comparing two checkpoints: formats, element types, order, exit codes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import nanprobe
from nanprobe.cli import main
from nanprobe.errors import UsageError
from nanprobe.numerics.native import load_kernels
from nanprobe.scan import look
from nanprobe.scan.compare import Compared, _add, _add_compiled
from nanprobe.scan_records import Change, DiffReport
from tests.checkpoints import layouts
from tests.scan.helpers import normal


def compared(a: Path, b: Path) -> DiffReport:
    record = nanprobe.diff_checkpoints(a, b).record
    assert isinstance(record, DiffReport)
    return record


def by_tensor(report: DiffReport) -> dict[str, Change]:
    return {change.tensor: change for change in report.changes}


def state() -> dict[str, torch.Tensor]:
    return {f"layers.{at}.weight": normal(20, 30, seed=at) for at in range(6)} | {"norm.weight": torch.ones(30)}


def pair(folder: Path, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[Path, Path]:
    save_file({name: tensor.clone() for name, tensor in a.items()}, folder / "a.safetensors")
    torch.save({"state_dict": {f"module.{name}": tensor.clone() for name, tensor in b.items()}}, folder / "b.pt")
    return folder / "a.safetensors", folder / "b.pt"


def test_the_same_values_in_two_formats(tmp_path: Path) -> None:
    report = compared(*pair(tmp_path, state(), state()))
    assert {change.kind for change in report.changes} == {"unchanged"}
    assert (report.exit_code, report.findings) == (0, ())
    assert report.summary.unchanged == 7


def test_the_figures_are_those_of_fp64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "BOX", 128)
    a, b = state(), state()
    b["layers.2.weight"] = b["layers.2.weight"] * 1.5
    b["layers.2.weight"][7, 11] += 3.0
    change = by_tensor(compared(*pair(tmp_path, a, b)))["layers.2.weight"]
    one, other = a["layers.2.weight"].double(), b["layers.2.weight"].double()
    assert change.rel_error == pytest.approx(((other - one).norm() / one.norm()).item(), rel=1e-9)
    assert change.max_abs == pytest.approx((other - one).abs().max().item(), rel=1e-12)
    assert change.index == (7, 11)
    assert change.cosine == pytest.approx(torch.cosine_similarity(one.flatten(), other.flatten(), 0).item(), rel=1e-9)
    assert change.changed == int((one != other).sum())


def test_worst_first_what_jumped_and_what_never_moved(tmp_path: Path) -> None:
    a, b = state(), state()
    for at in range(5):
        b[f"layers.{at}.weight"] = b[f"layers.{at}.weight"] * (1.001 if at else 2.0)
    report = compared(*pair(tmp_path, a, b))
    assert report.changes[0].tensor == "layers.0.weight"
    sizes = [change.rel_error for change in report.changes]
    assert sizes == sorted(sizes, reverse=True)
    assert report.jumped == ("layers.0.weight",)
    assert set(report.unmoved) == {"layers.5.weight", "norm.weight"}
    assert report.exit_code == 0


def test_added_removed_reshaped(tmp_path: Path) -> None:
    a, b = state(), state()
    del a["layers.1.weight"], b["layers.2.weight"]
    b["norm.weight"] = torch.ones(31)
    report = compared(*pair(tmp_path, a, b))
    assert [(one.rule, one.tensor, one.severity) for one in report.findings] == [
        ("shape-mismatch", "norm.weight", "error"),
        ("missing-key", "layers.2.weight", "warning"),
        ("unexpected-key", "layers.1.weight", "warning"),
    ]
    kinds = by_tensor(report)
    assert (kinds["layers.1.weight"].kind, kinds["layers.2.weight"].kind) == ("added", "removed")


def test_values_that_became_non_finite_are_an_error(tmp_path: Path) -> None:
    a, b = state(), state()
    a["layers.0.weight"][0, 0] = math.nan
    b["layers.0.weight"][0, 0] = math.nan
    b["layers.3.weight"][2, 3] = math.inf
    b["layers.3.weight"][9, 9] = math.nan
    report = compared(*pair(tmp_path, a, b))
    assert report.exit_code == 1
    assert report.changes[0].tensor == "layers.3.weight"
    assert (report.changes[0].newly_nonfinite, report.changes[0].first_index) == (2, (2, 3))
    assert [one.tensor for one in report.findings] == ["layers.3.weight"]
    back = compared(*reversed(pair(tmp_path, a, b)))
    assert back.exit_code == 0
    assert by_tensor(back)["module.layers.3.weight"].repaired == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_across_element_types(tmp_path: Path, dtype: torch.dtype) -> None:
    a = state()
    b = {name: tensor.to(dtype) for name, tensor in a.items()}
    change = by_tensor(compared(*pair(tmp_path, a, b)))["layers.2.weight"]
    one, other = a["layers.2.weight"].double(), b["layers.2.weight"].double()
    assert change.rel_error == pytest.approx(((other - one).norm() / one.norm()).item(), rel=1e-9)
    assert (change.dtype_a, change.dtype_b) == ("float32", str(dtype).removeprefix("torch."))


def test_views_integers_and_scalars(tmp_path: Path) -> None:
    a = {"view": normal(30, 20).t(), "ids": torch.arange(10), "scalar": torch.tensor(2.0), "empty": torch.zeros(0, 3)}
    b = {
        "view": normal(30, 20).t().clone(),
        "ids": torch.arange(10) + 1,
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
    }
    torch.save(a, tmp_path / "a.pt")
    torch.save(b, tmp_path / "b.pt")
    changes = by_tensor(compared(tmp_path / "a.pt", tmp_path / "b.pt"))
    assert changes["view"].kind == changes["empty"].kind == "unchanged"
    assert changes["ids"].changed == 10
    assert changes["scalar"].rel_error == 0.5


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair(tmp_path, state(), {name: tensor * 2 for name, tensor in state().items()})
    assert main(["diff-checkpoints", str(a), str(b), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "diff-checkpoints"
    assert document["changes"][0]["rel_error"] == pytest.approx(1.0)
    assert main(["diff-checkpoints", str(a), str(b), "-o", str(tmp_path / "d.json")]) == 0
    assert main(["render", str(tmp_path / "d.json"), "--format", "markdown"]) == 0
    assert "layers.0.weight" in capsys.readouterr().out
    assert main(["diff-checkpoints", str(a), str(tmp_path / "missing.pt")]) == 2


def test_what_is_left_out_of_the_table_is_counted_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = {f"kept.{at:02}": normal(4, seed=at) for at in range(50)}
    moved = {name: value + 1 for name, value in kept.items()}
    one, two = pair(tmp_path, kept, moved | {f"new.{at}": normal(4, seed=at) for at in range(3)})
    main(["diff-checkpoints", str(one), str(two)])
    out = " ".join(capsys.readouterr().out.split())
    assert "10 more changed less" in out
    assert "3 more added" in out


def test_a_distributed_checkpoint_against_a_file(tmp_path: Path) -> None:
    values = layouts.parameters()
    folder = layouts.save_dcp(tmp_path / "dcp", {"model": values})
    save_file({name: tensor.clone() for name, tensor in values.items()}, tmp_path / "model.safetensors")
    report = compared(folder, tmp_path / "model.safetensors")
    assert {change.kind for change in report.changes} == {"unchanged"}
    assert len(report.changes) == len(values)


def test_what_starts_at_zero_does_not_jump(tmp_path: Path) -> None:
    a, b = state(), state()
    a["fc.lora_B"] = torch.zeros(4, 4)
    b = {name: tensor * 1.001 for name, tensor in b.items()} | {"fc.lora_B": torch.full((4, 4), 1e-3)}
    report = compared(*pair(tmp_path, a, b))
    assert report.changes[0].tensor == "fc.lora_B"
    assert math.isinf(report.changes[0].rel_error or 0.0)
    assert report.jumped == ()


def test_nothing_in_common(tmp_path: Path) -> None:
    a, b = pair(tmp_path, {"x": torch.ones(2)}, {"y": torch.ones(2)})
    with pytest.raises(UsageError, match="no tensor in common"):
        compared(a, b)


@pytest.mark.parametrize("special", [False, True])
def test_compiled_comparisons_give_the_same_figures(special: bool) -> None:
    generator = np.random.default_rng(0)
    one = generator.standard_normal((40, 500)).astype(np.float32)
    other = one.copy()
    other[3:9] *= np.float32(1.25)
    other[37, 400] += 7
    if special:
        one[5, 5] = one[6, 6] = other[6, 6] = np.nan
        other[30, 1], other[30, 2], one[2, 2], other[2, 2] = np.inf, np.nan, np.inf, -np.inf
    plain, compiled = Compared(), Compared()
    kernels = load_kernels()
    assert kernels is not None
    with np.errstate(all="ignore"):
        _add(plain, one, other, (0, 0), one.shape)
        _add_compiled(compiled, one, other, (0, 0), one.shape, kernels)
    for name in ("changed", "newly_nonfinite", "repaired", "max_abs", "index", "first_index"):
        assert getattr(plain, name) == getattr(compiled, name), name
    for name in ("difference", "before", "after", "product"):
        assert getattr(plain, name) == pytest.approx(getattr(compiled, name), rel=1e-12), name
    assert plain.index == (37, 400)
    assert plain.newly_nonfinite == 2 * special
