"""Faults planted in checkpoints of every layout come out under the parameter's name, at the right place."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanprobe.scan_records import ScanReport
from tests.checkpoints import layouts
from tests.checkpoints.make import save_sharded
from tests.scan.helpers import found, scanned, worth_a_word

PLANTED = "fc.weight"
AT = (2, 3)


@pytest.fixture(params=[False, True], ids=["good", "bad"])
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Make every layout hold a NaN in one parameter, or leave it as it is."""
    original = layouts.parameters

    def parameters(seed: int = 0) -> dict[str, torch.Tensor]:
        values = original(seed)
        if request.param:
            values[PLANTED][AT] = math.nan
        return values

    monkeypatch.setattr(layouts, "parameters", parameters)
    return bool(request.param)


def sharded(folder: Path) -> Path:
    save_sharded(folder, layouts.parameters())
    return folder


def dcp(folder: Path) -> Path:
    return layouts.save_dcp(folder, {"model": layouts.parameters()})


def nemo(folder: Path) -> Path:
    folder.mkdir()
    return layouts.save_nemo(folder / "model.nemo")


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "sharded safetensors": sharded,
    "dcp": dcp,
    "megatron": layouts.save_megatron,
    "zero 1": lambda folder: layouts.save_deepspeed(folder, 1),
    "zero 1, three ranks": lambda folder: layouts.save_deepspeed(folder, 1, world=3, mappings=False),
    "zero 2, bf16": lambda folder: layouts.save_deepspeed(folder, 2, fp16=False),
    "zero 3": lambda folder: layouts.save_deepspeed(folder, 3),
    "universal": layouts.save_universal,
    "nemo": nemo,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_planted_nan(layout: str, planted: bool, tmp_path: Path) -> None:
    path = LAYOUTS[layout](tmp_path / "run") or tmp_path / "run"
    report = scanned(path, tensors=True)
    findings = found(report, "nonfinite-weight")
    states = found(report, "nonfinite-optimizer-state")
    if not planted:
        assert [one for one in report.findings if one.severity == "error"] == []
        return
    assert {one.tensor for one in findings} == {PLANTED}
    assert all(tuple(one.evidence["first_index"]) == AT for one in findings)
    assert all(one.evidence["nan"] == 1 and one.evidence["elements"] == 20 for one in findings)
    assert all(str(one.tensor).startswith(f"{PLANTED}.") for one in states)
    assert all(tuple(one.evidence["first_index"]) == AT for one in states)
    check_rows(report)


def check_rows(report: ScanReport) -> None:
    """Compare the rows of weights in full precision with the values that were saved."""
    values = layouts.parameters()
    rows = [row for row in report.tensors if row.tensor in values and row.dtype == "float32" and row.role == "weight"]
    for row in rows:
        value = values[row.tensor].double()
        finite = value[value.isfinite()]
        assert (row.elements, row.nan) == (value.numel(), int(value.isnan().sum()))
        assert (row.min, row.max) == (finite.min().item(), finite.max().item())
        assert row.rms == pytest.approx(finite.square().mean().sqrt().item(), rel=1e-9)


def test_blocks_of_two_ranks(tmp_path: Path) -> None:
    report = scanned(layouts.split_dcp(tmp_path / "blocks"), tensors=True)
    (row,) = report.tensors
    assert (row.shape, row.elements, row.min, row.max, row.zero) == ((6, 4), 24, 0.0, 23.0, 1)
    assert worth_a_word(report) == []


def test_a_lightning_checkpoint(tmp_path: Path) -> None:
    torch.save(layouts.lightning_state(), tmp_path / "last.ckpt")
    report = scanned(tmp_path / "last.ckpt")
    assert [(one.rule, one.severity) for one in report.findings if one.severity != "note"] == [
        ("loss-scale-collapsed", "error")
    ]
    assert "lightning" in report.summary.formats
