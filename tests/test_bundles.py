"""Replaying a bundle: its random state comes first, and a failure that does not reproduce is said."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanprobe.config import BatchSpec, Config, ModelSpec, Settings
from nanprobe.diagnose.reproduction import Original, not_reproduced
from nanprobe.inputs.rng import RandomState
from nanprobe.pipeline import replay_command
from nanprobe.records import ReplayReport

MODEL = """
import random
import numpy as np
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.drop, self.lin, self.factor = nn.Dropout(0.5), nn.Linear(64, 4), factor
    def forward(self, x):
        extra = float(np.random.rand()) + random.random()
        return self.lin(self.drop(x)) * self.factor + extra + torch.rand(4)

def build(factor=1.0):
    return Net(factor)
"""


def replayed(tmp_path: Path, bundle: dict[str, Any], *, factor: float = 1.0, **settings: Any) -> ReplayReport:
    (tmp_path / "model.py").write_text(MODEL)
    torch.save({"nanprobe_bundle": 1, **bundle}, tmp_path / "bad.pt")
    config = Config(
        source=None,
        folder=tmp_path,
        model=ModelSpec(factory="model.py:build", kwargs={"factor": factor}),
        batch=BatchSpec(path=tmp_path / "bad.pt"),
        settings=Settings(train=True, backward=False, **settings),
    )
    return replay_command(config, command="replay", precisions=("fp32", "fp16"))


def forward(report: ReplayReport) -> tuple[float | None, ...]:
    return tuple(row.precisions["fp32"].mean for row in report.modules if row.phase == "forward")


def test_the_random_state_of_a_bundle_is_restored_first(tmp_path: Path) -> None:
    random.seed(11)
    np.random.seed(12)
    torch.manual_seed(13)
    state = RandomState.capture().to_bundle()
    batch = torch.ones(8, 64)
    first = replayed(tmp_path, {"batch": batch, "rng": state}, seed=1)
    torch.manual_seed(99)
    again = replayed(tmp_path, {"batch": batch, "rng": state}, seed=1)
    without = replayed(tmp_path, {"batch": batch}, seed=1)
    assert forward(first) == forward(again) != forward(without)
    assert first.conditions["random_state"] == "restored from the bundle"
    assert without.conditions["random_state"] == "from the seed"
    # What the model draws is what it drew in the step: dropout's mask is that of the bundle's state.
    RandomState.from_bundle(state).restore()
    mask = torch.nn.functional.dropout(batch, 0.5)
    (drop,) = [row.precisions["fp32"] for row in first.modules if row.module == "drop"]
    assert drop.zero == int((mask == 0).sum())


def test_a_bundle_without_part_of_the_state_draws_the_same_in_every_lane(tmp_path: Path) -> None:
    state = RandomState.capture().to_bundle()
    other = RandomState.capture().to_bundle()
    random.seed(5)
    other["python"] = RandomState.capture().to_bundle()["python"]
    batch = torch.ones(8, 64)
    both = [replayed(tmp_path, {"batch": batch, "rng": rng}) for rng in (state, other)]
    assert forward(both[0]) != forward(both[1]), "Python's generator is not restored"
    del state["python"]
    state["numpy"] = None
    report = replayed(tmp_path, {"batch": torch.ones(8, 64), "rng": state})
    assert report.verdict == "clean"


def test_a_failure_that_does_not_reproduce_is_said_with_suspects(tmp_path: Path) -> None:
    amp = {"mode": "autocast", "dtype": "torch.bfloat16", "loss_scale": 1024.0}
    report = replayed(tmp_path, {"batch": torch.ones(8, 64), "reason": "loss is nan", "step": 17, "amp": amp})
    (finding,) = report.findings
    assert (finding.rule, finding.severity) == ("not-reproduced", "warning")
    assert "the bundle of step 17 says that training failed (loss is nan)" in finding.message
    suspects = " | ".join(finding.evidence["suspects"])
    assert "training ran in bf16, replayed here: fp16" in suspects
    assert "training used 1024, this was 1" in suspects
    assert "forward only" in suspects
    assert "one GPU's kernels" in suspects
    assert "random numbers" in suspects
    assert report.verdict == "clean"
    assert report.exit_code == 0
    assert any("cannot show defects of one GPU" in text for text in report.conditions["limits"])


def test_a_failure_that_reproduces_has_no_suspects(tmp_path: Path) -> None:
    report = replayed(tmp_path, {"batch": torch.ones(8, 64), "reason": "loss is nan"}, factor=1e6)
    assert report.verdict == "precision"
    assert "not-reproduced" not in [finding.rule for finding in report.findings]


def test_a_bundle_that_names_no_failure_is_just_a_batch(tmp_path: Path) -> None:
    report = replayed(tmp_path, {"batch": torch.ones(8, 64), "history": [{"loss": 1.0, "grad_norm": 2.0}]})
    assert report.findings == ()


CONDITIONS: dict[str, Any] = {
    "mode": "autocast",
    "loss_scales": {"fp16": 1024.0},
    "train": True,
    "backward": True,
    "attention": "math-half",
    "reduced_precision_reduction": True,
    "tf32": False,
    "precisions": ("fp16",),
    "device": "cpu",
    "compiled": False,
}


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"mode": "cast"}, "the mode (training used autocast, this was cast)"),
        ({"train": False}, "training mode"),
        ({"compiled": True}, "compiled kernels"),
        ({"attention": "fused"}, "--attention math-half"),
        ({"reduced_precision_reduction": None}, "--reduced-precision-reduction"),
        ({"tf32": None}, "--tf32"),
        ({"device": "cuda"}, "another GPU"),
    ],
)
def test_each_suspect_is_named_only_where_it_is_one(changed: dict[str, Any], part: str) -> None:
    original = Original(
        history=[{"loss": float("nan")}],
        amp={"mode": "autocast", "dtype": "float16", "loss_scale": 1024.0},
        random_restored=True,
    )
    plain = not_reproduced(original, "clean", CONDITIONS)
    other = not_reproduced(original, "clean", {**CONDITIONS, **changed})
    assert plain is not None
    assert other is not None
    assert "loss was nan" in plain.message
    assert part not in plain.message
    assert part in other.message
    assert not_reproduced(original, "precision", CONDITIONS) is None
    assert not_reproduced(None, "clean", CONDITIONS) is None
