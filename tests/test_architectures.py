"""Tiny random models of many families from ``transformers``: forward and backward in both modes, nothing found.

The models are untrained, so every finding would be a false one. Discrete choices may differ: experts that tie.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import nanprobe
from benchmarks.healthy import FAMILIES, HAND_WRITTEN, batch_for, mean_square


@pytest.mark.parametrize("mode", ["autocast", "cast"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_healthy_architecture_gives_no_finding(name: str, mode: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FAMILIES[name]()
        report = nanprobe.compare_precisions(model, batch_for(name), mode=mode, train=mode == "cast")
    assert report.verdict == "clean", report.render()
    assert report.exit_code == 0
    assert {f.rule for f in report.findings} <= {"routing-flip"}, report.render()
    assert report.record.conditions["backward"] is True
    assert all(result.completed and result.loss is not None for result in report.precisions.values())
    assert all(result.first_bad is None for result in report.precisions.values())
    assert not report.record.coverage.outputs_not_inspected


@pytest.mark.parametrize("mode", ["autocast", "cast"])
@pytest.mark.parametrize("name", [name for name in HAND_WRITTEN if "64 blocks" not in name])
def test_a_deep_or_kinky_model_gives_no_finding(name: str, mode: str) -> None:
    torch.manual_seed(0)
    model, batch = HAND_WRITTEN[name]()
    report = nanprobe.compare_precisions(model, batch, mode=mode, loss=mean_square)
    assert report.findings == (), report.render()
    assert report.verdict == "clean"


def test_a_fault_planted_in_a_decoder_is_found_there() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FAMILIES["t5"]()
        with torch.no_grad():
            model.decoder.block[1].layer[2].DenseReluDense.wo.weight.mul_(1e6)
        # T5 keeps this layer in FP32 when it is loaded in half; a plain cast does not.
        report = nanprobe.compare_precisions(model, batch_for("t5"), mode="autocast")
    first = report.precisions["fp16"].first_bad
    assert first is not None
    assert first.module == "decoder.block.1.layer.2.DenseReluDense.wo"
    assert report.precisions["bf16"].verdict == "clean"
