"""Roles from names, places and types."""

from __future__ import annotations

from typing import Any

import pytest

from nanprobe.checkpoints.records import TensorEntry
from nanprobe.scan.roles import Role, role_of


def entry(name: str, dtype: str = "float32", shape: tuple[int, ...] = (4, 4), **more: Any) -> TensorEntry:
    file = more.pop("file", "model.pt")
    return TensorEntry(name=name, path=tuple(name.split(".")), file=file, dtype=dtype, shape=shape, **more)


@pytest.mark.parametrize(
    ("made", "role", "state"),
    [
        (entry("layers.0.mlp.weight"), "weight", ""),
        (entry("layers.0.mlp.bias", shape=(4,)), "weight", ""),
        (entry("bn.running_var", shape=(4,)), "buffer", ""),
        (entry("bn.num_batches_tracked", "int64", ()), "buffer", ""),
        (entry("h.0.attn.bias", "bool"), "buffer", ""),
        (entry("embeddings.position_ids", "int64"), "buffer", ""),
        (entry("rotary_emb.inv_freq"), "buffer", ""),
        (entry("fc.weight", "int8"), "weight", ""),
        (entry("blk.0.weight", "q4_0", layout="blocks"), "weight", ""),
        (entry("fc.weight_scale"), "scale", ""),
        (entry("fc.weight_scale_inv"), "scale", ""),
        (entry("experts.down_proj_scales", "uint8"), "scale", ""),
        (entry("model.q.scales", "float16"), "scale", ""),
        (entry("logit_scale", shape=()), "weight", ""),
        (entry("blocks.0.layer_scale"), "weight", ""),
        (entry("norm.scale", shape=(4,)), "weight", ""),
        (entry("conv.quant_state.scale"), "scale", ""),
        (entry("optimizer.state.0.exp_avg"), "moment", "exp_avg"),
        (entry("fc.weight.exp_avg_sq"), "moment", "exp_avg_sq"),
        (entry("optimizer.state.0.sum"), "moment", "sum"),
        (entry("optimizer.state.0.step", shape=()), "step", "step"),
        (entry("0.momentum_buffer", file="optimizer.pt"), "moment", "momentum_buffer"),
        (entry("optimizer.param_groups.0.lr", shape=()), "learning-rate", ""),
        (entry("optimizer.state.0.something"), "other", "optimizer"),
        (entry("model_ema.fc.weight"), "ema", ""),
        (entry("semantic.weight"), "weight", ""),
        (entry("torch_rng_state", "uint8"), "rng", ""),
        (entry("0", "uint8", file="rng_state_0.pth"), "rng", ""),
        (entry("fc.weight", role="weight"), "weight", ""),
        (entry("x", role="exp_avg"), "moment", "exp_avg"),
        (entry("x", role="step"), "step", "step"),
        (entry("x", role="loss-scale"), "other", "loss-scale"),
        (entry("x", role="callback"), "other", "callback"),
        (entry("x", role="rng"), "rng", ""),
    ],
    ids=lambda value: value.name if isinstance(value, TensorEntry) else None,
)
def test_roles(made: TensorEntry, role: str, state: str) -> None:
    assert role_of(made) == Role(role, state)
