"""Rules about values: each with a checkpoint that triggers it and a near miss that must not."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanprobe.checkpoints import CheckpointIndex, index_checkpoint
from nanprobe.formats import by_name
from tests.scan.helpers import found, normal, only, saved, scanned, weights, worth_a_word

INF, NAN = math.inf, math.nan


def test_a_healthy_model_is_clean(tmp_path: Path) -> None:
    model = torch.nn.TransformerEncoderLayer(64, 4, 128)
    assert worth_a_word(weights(tmp_path, model.state_dict())) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_non_finite_weights_are_counted_with_the_first_index(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = normal(40, 30)
    weight[7, 3], weight[7, 4], weight[9, 0], weight[39, 29] = NAN, INF, -INF, NAN
    finding = only(weights(tmp_path, {"fc.weight": weight.to(dtype), "fc.bias": torch.ones(3)}), "nonfinite-weight")
    assert (finding.severity, finding.tensor, finding.shape) == ("error", "fc.weight", (40, 30))
    assert finding.evidence["first_index"] == [7, 3]
    counts = {key: finding.evidence[key] for key in ("elements", "nan", "posinf", "neginf", "count")}
    assert counts == {"elements": 1200, "nan": 2, "posinf": 1, "neginf": 1, "count": 4}
    assert finding.evidence["absmax"] == weight.to(dtype).double()[weight.to(dtype).double().isfinite()].abs().max()


def test_the_first_index_is_that_of_the_logical_tensor(tmp_path: Path) -> None:
    base = normal(6, 5)
    base[4, 1] = base[2, 3] = NAN
    report = saved(tmp_path, {"w": base.t(), "rows": base[1:, ::2]})
    first = {one.tensor: one.evidence["first_index"] for one in found(report, "nonfinite-weight")}
    assert first == {"w": [1, 4]}
    base[3, 4] = INF
    report = saved(tmp_path, {"rows": base[1:, ::2]})
    assert only(report, "nonfinite-weight").evidence["first_index"] == [2, 2]


def test_minus_infinity_in_a_mask_is_meant(tmp_path: Path) -> None:
    mask = torch.triu(torch.full((5, 5), -INF), 1)
    assert worth_a_word(weights(tmp_path, {"attn.causal": mask, "attn.masked_bias": torch.tensor(-INF)})) == []


@pytest.mark.parametrize("spoiled", [NAN, INF, 1.0])
def test_a_mask_with_anything_else_in_it_is_no_mask(tmp_path: Path, spoiled: float) -> None:
    mask = torch.triu(torch.full((5, 5), -INF), 1)
    mask[0, 0] = spoiled
    only(weights(tmp_path, {"attn.causal": mask}), "nonfinite-weight")


def test_a_parameter_of_no_dimensions_may_not_be_minus_infinity(tmp_path: Path) -> None:
    only(weights(tmp_path, {"logit_scale": torch.tensor(-INF)}), "nonfinite-weight")


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8-e4m3", "fp8-e5m2"])
def test_the_cast_overflows_exactly_from_its_threshold_on(tmp_path: Path, name: str) -> None:
    limit = by_name(name).overflow_threshold
    weight = normal(20, 20, scale=1.0).double()
    weight[3, 4] = -limit
    weight[5, 6] = math.nextafter(limit, 0)
    finding = only(weights(tmp_path, {"w": weight}, casts=(name,)), "cast-overflow")
    assert (finding.severity, finding.evidence["format"], finding.evidence["count"]) == ("warning", name, 1)
    assert finding.evidence["first_index"] == [3, 4]
    weight[3, 4] = 0.0
    report = weights(tmp_path, {"w": weight}, casts=(name,))
    assert found(report, "cast-overflow") == []
    assert only(report, "near-limit").evidence["format"] == name


def test_one_finding_for_each_format(tmp_path: Path) -> None:
    weight = normal(20, 20)
    weight[0, 0] = 1e5
    report = weights(tmp_path, {"w": weight}, casts=("fp16", "bf16", "fp8-e4m3", "fp8-e5m2"))
    assert {one.evidence["format"] for one in found(report, "cast-overflow")} == {"fp16", "fp8-e4m3", "fp8-e5m2"}


def test_optimizer_state_is_not_judged_by_casts(tmp_path: Path) -> None:
    report = weights(tmp_path, {"optimizer.state.fc.weight.exp_avg_sq": normal(20, 20).square() * 1e-9})
    assert found(report, "cast-underflow", notes=True) == []


def test_flushed_to_zero_up_to_half_the_smallest_subnormal(tmp_path: Path) -> None:
    limit = by_name("fp16").flush_threshold
    weight = normal(10, 10)
    weight[0, 1], weight[2, 0], weight[3, 3] = limit, -limit / 2, limit * 1.001
    finding = only(weights(tmp_path, {"w": weight}), "cast-underflow")
    assert (finding.evidence["count"], finding.evidence["first_index"]) == (2, [0, 1])
    assert finding.severity == "warning"


def test_a_tiny_share_of_flushed_elements_is_a_note(tmp_path: Path) -> None:
    weight = normal(400, 100)
    weight[0, 1] = 1e-9
    finding = only(weights(tmp_path, {"w": weight}), "cast-underflow", notes=True)
    assert (finding.severity, finding.evidence["count"]) == ("note", 1)


def test_near_the_limit(tmp_path: Path) -> None:
    weight = normal(20, 20)
    weight[1, 1] = 40000.0
    assert only(weights(tmp_path, {"w": weight}), "near-limit").evidence["absmax"] == 40000.0
    weight[1, 1] = 30000.0
    assert found(weights(tmp_path, {"w": weight}), "near-limit") == []


def test_a_tensor_of_subnormal_numbers(tmp_path: Path) -> None:
    weight = normal(30, 30) * 1e-40
    finding = only(weights(tmp_path, {"output_layer.weight": weight}), "subnormal")
    assert finding.evidence["count"] == int((weight != 0).sum())
    mostly = normal(30, 30)
    mostly[0] *= 1e-40
    assert found(weights(tmp_path, {"output_layer.weight": mostly}), "subnormal") == []


def test_zero_weights_and_those_that_may_be(tmp_path: Path) -> None:
    zero = torch.zeros(16, 16)
    assert only(weights(tmp_path, {"mlp.up_proj.weight": zero}), "all-zero").evidence["count"] == 256
    fine = {
        "fc.bias": torch.zeros(16),
        "norm.bias": torch.zeros(16),
        "bn.weight": torch.zeros(16),
        "q_proj.lora_B.default.weight": zero.clone(),
        "controlnet_mid_block.weight": zero.clone(),
        "blocks.0.adaLN_modulation.1.weight": zero.clone(),
        "pos_embed": torch.zeros(1, 4, 16),
        "running_mean": torch.zeros(16),
        "relative_position_bias": zero.clone(),
    }
    assert worth_a_word(weights(tmp_path, fine)) == []


def test_constant_weights_and_those_that_may_be(tmp_path: Path) -> None:
    assert only(weights(tmp_path, {"fc.weight": torch.full((8, 8), 0.5)}), "constant").evidence["value"] == 0.5
    fine = {"norm.weight": torch.ones(64), "layer_scale.gamma": torch.full((8, 8), 1e-6), "scalar": torch.tensor([3.0])}
    assert worth_a_word(weights(tmp_path, fine)) == []
    almost = torch.full((8, 8), 0.5)
    almost[0, 0] = 0.25
    assert worth_a_word(weights(tmp_path, {"fc.weight": almost})) == []


def test_an_outlier_and_a_heavy_tail(tmp_path: Path) -> None:
    weight = normal(64, 64)
    weight[10, 20] = -1e4
    finding = only(weights(tmp_path, {"fc.weight": weight}), "outlier")
    assert (finding.evidence["first_index"], finding.evidence["absmax"], finding.evidence["count"]) == (
        [10, 20],
        1e4,
        1,
    )
    weight[10, 20] = 0.9
    assert found(weights(tmp_path, {"fc.weight": weight}), "outlier") == []
    heavy = torch.distributions.StudentT(3.0).sample((64, 64)) * 0.02
    assert found(weights(tmp_path, {"fc.weight": heavy}), "outlier") == []


def test_dead_rows_and_columns(tmp_path: Path) -> None:
    weight = normal(12, 20)
    weight[4] = 0
    weight[:, 7] = 0
    weight[:, 9] = 0
    finding = only(weights(tmp_path, {"fc.weight": weight}), "dead-rows")
    assert (finding.evidence["rows"], finding.evidence["columns"]) == (1, 2)
    assert finding.evidence["first_index"] == [4, 0]
    weight = normal(12, 20)
    weight[4, 1:] = 0
    weight[1:, 7] = 0
    assert found(weights(tmp_path, {"fc.weight": weight}), "dead-rows") == []


def test_padding_rows_of_an_embedding(tmp_path: Path) -> None:
    table = normal(50, 8)
    table[0] = 0
    table[40:] = 0
    assert found(weights(tmp_path, {"model.embed_tokens.weight": table}), "dead-rows") == []
    table[10:20] = 0
    assert only(weights(tmp_path, {"model.embed_tokens.weight": table}), "dead-rows").evidence["rows"] == 11


def test_quantisation_scales(tmp_path: Path) -> None:
    scale = torch.full((4, 1), 0.1)
    tensors = {"fc.weight": torch.arange(64, dtype=torch.int8).reshape(4, 16), "fc.weight_scale": scale}
    assert worth_a_word(weights(tmp_path, tensors)) == []
    scale[2] = 0
    assert only(weights(tmp_path, tensors), "all-zero").evidence["first_index"] == [2, 0]
    scale[1] = NAN
    assert only(weights(tmp_path, tensors), "nonfinite-weight").tensor == "fc.weight_scale"


def test_shared_storages_are_read_once(tmp_path: Path) -> None:
    weight = normal(128, 128)
    report = saved(tmp_path, {"a.weight": weight, "b.weight": weight, "c": weight[:3]})
    assert report.summary.bytes == weight.nbytes
    assert report.summary.tensors == 3


@pytest.mark.parametrize("compressed", [False, True])
def test_what_is_in_a_big_file_is_found(tmp_path: Path, compressed: bool) -> None:
    """More than one chunk and more than one segment of one tensor, through the compiled loops."""
    weight = torch.zeros(3 << 20, dtype=torch.bfloat16).normal_(generator=torch.Generator().manual_seed(1))
    weight[2_900_001] = NAN
    path = tmp_path / "big.pt"
    torch.save({"w": weight.reshape(3, -1)}, path)
    if compressed:
        packed = tmp_path / "packed.pt"
        with (
            zipfile.ZipFile(path) as source,
            zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as target,
        ):
            for name in source.namelist():
                target.writestr(name, source.read(name))
        path = packed
    finding = only(scanned(path), "nonfinite-weight")
    assert finding.evidence["first_index"] == [2, 2_900_001 - (2 << 20)]
    assert finding.evidence["nan"] == 1


def test_a_file_that_becomes_shorter_while_it_is_scanned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": normal(100, 100), "b": normal(100, 100)}, path)

    def index_and_cut(where: str) -> CheckpointIndex:
        index = index_checkpoint(where)
        path.write_bytes(path.read_bytes()[:-30_000])
        return index

    monkeypatch.setattr("nanprobe.scan.scanner.index_checkpoint", index_and_cut)
    report = scanned(path)
    assert only(report, "truncated-file").tensor == "b"
    assert (report.summary.scanned, report.summary.unreadable, report.exit_code) == (1, 1, 1)


def test_bytes_that_changed_after_they_were_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": normal(100, 100)}, path)
    data = bytearray(path.read_bytes())
    at = data.find(normal(100, 100)[5].numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert only(scanned(path), "corrupt-file").severity == "error"
    assert worth_a_word(scanned(path, check_crc=False)) == []


def test_a_view_that_claims_more_elements_than_any_memory_holds(tmp_path: Path) -> None:
    base = torch.tensor([[math.nan]])
    huge = base.expand(1 << 20, 1 << 21)
    finding = only(saved(tmp_path, {"w": huge}), "nonfinite-weight")
    assert finding.evidence["nan"] == 1 << 41
    assert "first_index" not in finding.evidence
    zero = torch.zeros(1).expand(1 << 20, 1 << 21)
    assert only(saved(tmp_path, {"w": zero}), "all-zero").evidence["count"] == 1 << 41
