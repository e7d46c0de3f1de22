"""Arguments of the Python interface that make no sense are refused in one line, and change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import nanprobe
from nanprobe.config import IgnoreRule, Tolerance
from nanprobe.errors import UsageError
from tests.lanes.support import assert_healthy, mean_square, untouched


class Unfinished(nn.Module):
    """A module whose ``__init__`` forgot its parent's."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "fp17"}, r"^dtype: no such precision 'fp17'; did you mean"),
        ({"dtype": torch.int8}, r"^dtype: no such precision 'torch.int8'"),
        ({"dtype": torch.float64}, r"^dtype: no such precision 'torch.float64'"),
        ({"dtype": "int8"}, r"^dtype: no such precision 'int8'; there are `fp32`, `fp16`, .*`fp8-e4m3`, `fp8-e5m2`$"),
        ({"dtype": None}, r"^dtype: "),
        ({"dtype": 16}, r"^dtype: "),
        ({"model": lambda x: x}, r"^model: expected a torch.nn.Module, got a function"),
        ({"model": "model.py"}, r"^model: expected a torch.nn.Module, got a str"),
        ({"mode": "half"}, r"^mode: "),
        ({"loss_scale": 0}, r"^loss_scale: "),
        ({"loss_scale": "big"}, r"^loss_scale: "),
        ({"los_scale": 2.0}, r"^no such setting 'los_scale'; did you mean .*loss_scale"),
        ({"seed": -1}, r"^seed: "),
        ({"device": "tpu"}, r"^device: "),
        ({"keep_fp32": 3}, r"^keep_fp32: "),
        ({"keep_fp32": ["*.missing"]}, r"^keep_fp32: the pattern '\*\.missing' matches no module"),
        ({"call": "star"}, r"^call: "),
        ({"loss": "mse"}, r"^loss: "),
        ({"batch": {"y": torch.ones(2, 4)}}, r"^batch: the model takes no argument `y`"),
        ({"batch": ()}, r"^batch: the model needs the argument `input`"),
        ({"batch": (torch.ones(1), torch.ones(1))}, r"^batch: 2 positional arguments are too many"),
        ({"batch": torch.ones(2, 5)}, r"^batch: "),
        ({"batch": torch.ones(2, 4).long()}, r"^batch: "),
        ({"batch": None}, r"^batch: "),
        ({"batch": 3.0}, r"^batch: "),
        ({"batch": torch.ones(2, 4, device="meta")}, r"^batch: the tensor is on the meta device"),
        ({"tolerances": {"fp16": 64}}, r"^tolerances: expected a list of Tolerance, got a mapping"),
        ({"tolerances": 5}, r"^tolerances: expected a list of Tolerance, got the number 5"),
        ({"ignore": [{"module": "x"}]}, r"^ignore: expected a list of IgnoreRule, got a mapping"),
        ({"batch_dim": 7}, r"^batch: `dim: 7` is beyond its tensors"),
        ({"model": nn.Linear(4, 4, device="meta")}, r"^model: parameter `weight` is on the meta device"),
        ({"model": nn.BatchNorm1d(4, affine=False, device="meta")}, r"^model: buffer `running_mean` is on the meta"),
        ({"model": nn.Sequential(Unfinished.__new__(Unfinished))}, r"^model: its class Unfinished does not call super"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(arguments: dict[str, Any], message: str) -> None:
    model = nn.Linear(4, 4)
    given = {"model": model, "batch": torch.ones(2, 4), **arguments}
    with untouched(model), pytest.raises(UsageError, match=message) as caught:
        nanprobe.replay(given.pop("model"), given.pop("batch"), **given)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_dtypes_that_make_no_sense() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    for dtypes in ((), [], ("fp32", "fp00"), 3):
        with pytest.raises(UsageError, match=r"^dtype"):
            nanprobe.compare_precisions(model, x, dtypes=dtypes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtypes", "order"),
    [
        (("fp32", "fp16", "bf16"), ["fp32", "fp16", "bf16"]),
        (("bf16", "fp16"), ["fp32", "bf16", "fp16"]),
        ((torch.bfloat16,), ["fp32", "bf16"]),
        (("fp16", "fp16", torch.float16), ["fp32", "fp16"]),
        (("fp32",), ["fp64", "fp32"]),
        ("fp16", ["fp32", "fp16"]),
    ],
)
def test_precisions_in_the_order_asked_for(dtypes: Any, order: list[str]) -> None:
    report = nanprobe.compare_precisions(nn.Linear(4, 4), torch.randn(2, 4), dtypes=dtypes)
    assert list(report.precisions) == order


def test_settings_of_every_kind_are_taken() -> None:
    report = nanprobe.replay(
        nn.Linear(4, 4),
        torch.randn(2, 4),
        dtype=torch.bfloat16,
        loss=mean_square,
        call="single",
        mode="cast",
        train=False,
        backward=True,
        loss_scale=8,
        keep_fp32=(),
        seed=5,
        ignore=[IgnoreRule(module="x", mechanism="overflow", why="known")],
        tolerances=[Tolerance(format="bf16", multiple=100.0)],
        device="cpu",
        batch_dim=0,
    )
    assert_healthy(report, ("bf16",))
    assert report.record.conditions["loss_scales"] == {"bf16": 8.0}
    assert report.record.conditions["train"] is False
    assert report.record.conditions["seed"] == 5


def test_a_report_from_the_interface_survives_a_round_trip(tmp_path: Any) -> None:
    report = nanprobe.compare_precisions(nn.Linear(4, 4), torch.randn(2, 4), loss=mean_square)
    (tmp_path / "report.json").write_text(report.to_json(), encoding="utf-8")
    assert nanprobe.load_report(tmp_path / "report.json") == report
