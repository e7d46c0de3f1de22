"""Rules about tensors beside each other, and about the model that a config describes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import nanprobe
from nanprobe.errors import UsageError
from nanprobe.scanning import model_shape
from tests.scan.helpers import found, normal, only, saved, scanned, weights, worth_a_word


def tied_folder(folder: Path, head: torch.Tensor, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"model.embed_tokens.weight": normal(20, 6), "lm_head.weight": head}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_tied_weights_that_disagree(tmp_path: Path) -> None:
    head = normal(20, 6)
    head[3, 1] += 0.5
    head[4, 0] += 0.25
    finding = only(scanned(tied_folder(tmp_path / "a", head, tie_word_embeddings=True)), "tied-mismatch")
    assert (finding.tensor, finding.severity) == ("lm_head.weight", "warning")
    assert (finding.evidence["count"], finding.evidence["first_index"]) == (2, [3, 1])
    assert worth_a_word(scanned(tied_folder(tmp_path / "a", head, tie_word_embeddings=False))) == []
    assert worth_a_word(scanned(tied_folder(tmp_path / "a", normal(20, 6), tie_word_embeddings=True))) == []


def test_encoder_and_decoder_share_a_table(tmp_path: Path) -> None:
    table = normal(9, 4)
    good = {"shared.weight": table, "encoder.embed_tokens.weight": table.clone()}
    assert worth_a_word(weights(tmp_path, good)) == []
    bad = {"shared.weight": table, "encoder.embed_tokens.weight": table + 1}
    assert only(weights(tmp_path, bad), "tied-mismatch").evidence["count"] == 36


def test_the_configuration_says_another_type(tmp_path: Path) -> None:
    head = normal(20, 6)
    only(scanned(tied_folder(tmp_path / "a", head, torch_dtype="bfloat16")), "dtype-mismatch")
    assert worth_a_word(scanned(tied_folder(tmp_path / "a", head, torch_dtype="float32"))) == []


def test_averages_against_the_model(tmp_path: Path) -> None:
    model = {"fc.weight": normal(6, 6), "fc.bias": normal(6, seed=1)}
    average = {name: tensor.clone() for name, tensor in model.items()}
    assert worth_a_word(saved(tmp_path, {"model": model, "ema": average})) == []
    average["fc.weight"][2, 2] = math.nan
    report = saved(tmp_path, {"model": model, "ema": average})
    assert only(report, "ema-mismatch").severity == "warning"
    assert len(found(report, "nonfinite-weight")) == 1
    average["fc.weight"] = torch.zeros(6, 6)
    only(saved(tmp_path, {"model": model, "ema": average}), "ema-mismatch")
    average["fc.weight"] = normal(6, 5)
    only(saved(tmp_path, {"model": model, "ema": average}), "ema-mismatch")


def test_a_saved_view_drags_its_base_along(tmp_path: Path) -> None:
    base = normal(400, 100)
    finding = only(saved(tmp_path, {"w": base[:2]}), "storage-bloat")
    assert (finding.evidence["bytes"], finding.evidence["used"]) == (160_000, 800)
    assert found(saved(tmp_path, {"w": base[:2].clone()}), "storage-bloat") == []
    assert found(saved(tmp_path, {"a": base[:200], "b": base[200:]}), "storage-bloat") == []


def small_model() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 10, bias=False), torch.nn.LayerNorm(10))
    model[1].weight = model[0].weight
    return model


def test_names_and_shapes_against_a_model(tmp_path: Path) -> None:
    model = small_model()
    path = tmp_path / "m.safetensors"
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del state["1.weight"]  # tied, and left out by design
    save_file(state, path)
    assert nanprobe.scan_checkpoint(path, model=model).findings == ()
    save_file({f"module.{name}": tensor for name, tensor in state.items()}, path)
    assert nanprobe.scan_checkpoint(path, model=model).findings == ()
    del state["2.bias"]
    state["2.weight"] = torch.ones(11)
    state["3.weight"] = torch.ones(2)
    save_file(state, path)
    rules = {(one.rule, one.tensor, one.severity) for one in nanprobe.scan_checkpoint(path, model=model).findings}
    assert rules == {
        ("missing-key", "2.bias", "warning"),
        ("shape-mismatch", "2.weight", "error"),
        ("unexpected-key", "3.weight", "warning"),
    }


def test_a_model_on_the_meta_device_will_do() -> None:
    with torch.device("meta"):
        shape = model_shape(small_model())
    assert shape["0.weight"] == ((10, 4), "0.weight")
    assert shape["1.weight"] == ((10, 4), "0.weight")
    with pytest.raises(UsageError, match="expected a torch"):
        model_shape(3)
