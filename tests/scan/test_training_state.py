"""Rules about optimizer state, loss scale, learning rate, training log: a trigger and a near miss each."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scan.helpers import Adam, found, normal, only, saved, scanned, worth_a_word

NAN, INF = math.nan, math.inf


def test_a_healthy_run_is_clean(tmp_path: Path) -> None:
    tree = Adam().tree() | {"scaler": {"scale": 65536.0, "_growth_tracker": 3, "growth_factor": 2.0}, "epoch": 3}
    assert worth_a_word(saved(tmp_path, tree)) == []


OPTIMIZERS = (
    "AdamW",
    "SGD",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "NAdam",
    "Adamax",
    "Rprop",
    "ASGD",
    "Adafactor",
    "RAdam",
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_pytorch_saves_is_clean(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    body = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 9)
    )
    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(50, 16, padding_idx=0), "body": body})
    optimizer = getattr(torch.optim, name)(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(4):
        optimizer.zero_grad()
        body(model["emb"](torch.randint(0, 30, (8, 5))).mean(1)).square().sum().backward()
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
    tree = {"model": model, "optimizer": optimizer, "scheduler": schedule, "ema": average}
    states = {key: held.state_dict() for key, held in tree.items()} | {"rng": torch.get_rng_state()}
    assert worth_a_word(saved(tmp_path, states)) == []


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_non_finite_moments(tmp_path: Path, bad: float) -> None:
    adam = Adam()
    adam.state(0, "exp_avg")[1, 2] = bad
    finding = only(saved(tmp_path, adam.tree()), "nonfinite-optimizer-state")
    assert finding.severity == "error"
    assert finding.tensor == "weight.exp_avg"
    assert finding.evidence["key"] == "optimizer.state.0.exp_avg"
    assert finding.evidence["first_index"] == [1, 2]


def test_a_negative_second_moment(tmp_path: Path) -> None:
    adam = Adam()
    adam.state(0, "exp_avg_sq")[2, 0] = -1e-12
    adam.state(0, "exp_avg_sq")[3, 0] = -0.0
    finding = only(saved(tmp_path, adam.tree()), "negative-second-moment")
    assert (finding.severity, finding.evidence["count"], finding.evidence["first_index"]) == ("error", 1, [2, 0])


def test_a_negative_first_moment_is_normal(tmp_path: Path) -> None:
    adam = Adam()
    adam.state(0, "exp_avg")[2, 0] = -1.0
    assert worth_a_word(saved(tmp_path, adam.tree())) == []


def test_a_second_moment_that_vanished(tmp_path: Path) -> None:
    adam = Adam()
    adam.state(0, "exp_avg_sq")[1, 1:4] = 0
    finding = only(saved(tmp_path, adam.tree()), "zero-second-moment")
    assert (finding.severity, finding.evidence["count"], finding.evidence["first_index"]) == ("warning", 3, [1, 1])
    assert finding.remedy is not None
    assert "FP32" not in finding.remedy  # it is FP32 already
    adam.state(0, "exp_avg")[1, 1:4] = 0
    assert worth_a_word(saved(tmp_path, adam.tree())) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_moments_in_half(tmp_path: Path, dtype: torch.dtype) -> None:
    tree = Adam().tree()
    tree["optimizer"]["state"][0]["exp_avg_sq"] = tree["optimizer"]["state"][0]["exp_avg_sq"].to(dtype)
    assert only(saved(tmp_path, tree), "dtype-mismatch").tensor == "weight.exp_avg_sq"


@pytest.mark.parametrize(
    ("dtype", "stuck", "fine"), [(torch.bfloat16, 256, 128), (torch.float16, 2048, 1024), (torch.float32, 2**24, 2**20)]
)
def test_a_counter_that_its_type_cannot_increase(tmp_path: Path, dtype: torch.dtype, stuck: int, fine: int) -> None:
    for value, expected in ((stuck, 2), (fine, 0)):
        tree = Adam().tree()
        for state in tree["optimizer"]["state"].values():
            state["step"] = torch.tensor(float(value), dtype=dtype)
        findings = found(saved(tmp_path, tree), "step-stalled")
        assert len(findings) == expected
        assert all(one.severity == "warning" for one in findings)


@pytest.mark.parametrize(
    ("value", "rule"),
    [(0.0, "step-stalled"), (2.0, "step-stalled"), (-3.0, "step-stalled"), (NAN, "nonfinite-optimizer-state")],
)
def test_a_counter_that_is_wrong(tmp_path: Path, value: float, rule: str) -> None:
    tree = Adam().tree()
    tree["optimizer"]["state"][1]["step"] = torch.tensor(value)
    tree["optimizer"]["state"][2] = {key: held.clone() for key, held in tree["optimizer"]["state"][0].items()}
    tree["optimizer"]["param_groups"][0]["params"] = [0, 1, 2]
    assert rule in [rule for rule, _ in worth_a_word(saved(tmp_path, tree))]


def scaler_tree(scale: Any) -> dict[str, Any]:
    return {"state_dict": {"w": normal(4, 4)}, "scaler": {"scale": scale, "growth_factor": 2.0, "backoff_factor": 0.5,
            "growth_interval": 2000, "_growth_tracker": 7}}  # fmt: skip


@pytest.mark.parametrize(
    ("scale", "rule", "severity"),
    [
        (0.0, "loss-scale-collapsed", "error"),
        (5.3e-23, "loss-scale-collapsed", "error"),
        (0.5, "loss-scale-collapsed", "error"),
        (NAN, "loss-scale-nonfinite", "error"),
        (INF, "loss-scale-nonfinite", "error"),
        (2.0**40, "loss-scale-nonfinite", "warning"),
    ],
)
def test_a_loss_scale_that_is_none(tmp_path: Path, scale: float, rule: str, severity: str) -> None:
    finding = only(saved(tmp_path, scaler_tree(scale)), rule)
    assert finding.severity == severity
    assert finding.evidence["key"] == "scaler.scale"


@pytest.mark.parametrize("scale", [1.0, 65536.0, 2.0**24])
def test_a_loss_scale_that_is_usual(tmp_path: Path, scale: float) -> None:
    assert worth_a_word(saved(tmp_path, scaler_tree(scale))) == []


@pytest.mark.parametrize(
    ("rate", "rule", "severity"),
    [(NAN, "nonfinite-scalar", "error"), (INF, "nonfinite-scalar", "error"), (-1e-3, "learning-rate", "warning"),
     (0.0, "learning-rate", "warning"), (1e4, "learning-rate", "warning")],
)  # fmt: skip
def test_a_learning_rate_that_is_none(tmp_path: Path, rate: float, rule: str, severity: str) -> None:
    tree = Adam().tree()
    tree["optimizer"]["param_groups"][0]["lr"] = rate
    finding = only(saved(tmp_path, tree), rule)
    assert (finding.severity, finding.evidence["key"]) == (severity, "optimizer.param_groups.0.lr")


def test_a_schedule_may_end_at_zero(tmp_path: Path) -> None:
    tree = Adam().tree()
    tree["optimizer"]["param_groups"][0]["lr"] = 0.0
    tree["lr_scheduler"] = {"last_epoch": 1000, "_step_count": 1001, "base_lrs": [1e-3], "_last_lr": [0.0]}
    assert worth_a_word(saved(tmp_path, tree)) == []


def trainer_folder(folder: Path, history: list[dict[str, Any]], **more: Any) -> Path:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    save_file({"w": normal(4, 4)}, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 30, "log_history": history, **more}))
    return folder


def test_a_training_log_with_nan(tmp_path: Path) -> None:
    history = [{"step": 10, "loss": 2.5, "grad_norm": 1.0}, {"step": 20, "loss": 0.0, "grad_norm": NAN},
               {"step": 30, "loss": 0.0, "grad_norm": NAN}]  # fmt: skip
    finding = only(scanned(trainer_folder(tmp_path / "run", history)), "nonfinite-scalar")
    assert finding.severity == "error"
    assert (finding.evidence["key"], finding.evidence["step"], finding.evidence["count"]) == ("grad_norm", 20, 2)
    assert found(scanned(trainer_folder(tmp_path / "run", history[:1])), "nonfinite-scalar") == []


def test_fp16_without_a_loss_scale(tmp_path: Path) -> None:
    tree = Adam().tree()
    args = argparse.Namespace(fp16=True)
    only(saved(tmp_path, tree | {"args": args}), "loss-scale-absent")
    assert found(saved(tmp_path, tree | {"args": args, "scaler": {"scale": 1024.0}}), "loss-scale-absent") == []
    assert found(saved(tmp_path, tree | {"args": argparse.Namespace(fp16=False)}), "loss-scale-absent") == []


def test_callbacks_may_hold_infinity(tmp_path: Path) -> None:
    tree = {
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {"w": normal(4, 4)},
        "callbacks": {"ModelCheckpoint": {"kth_value": torch.tensor(INF), "best_model_score": torch.tensor(0.5)}},
        "optimizer_states": [],
        "lr_schedulers": [],
    }
    report = saved(tmp_path, tree, "last.ckpt")
    assert worth_a_word(report) == []
