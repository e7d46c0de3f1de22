"""Make the weights and the batch of each sample run from fixed seeds: ``python sample_runs/make.py [NAME ...]``.

Every run is a model of 2e4 to 1e5 parameters with one planted fault (or none), healthy before and behind it. The models
stand beside their files as ``model.py``; here only the weights that carry the fault are changed.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent


def load_model_file(name: str) -> ModuleType:
    """Import the model.py of the run ``name``."""
    spec = importlib.util.spec_from_file_location(f"sample_{name.replace('-', '_')}", HERE / name / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seen_by(model: nn.Module, path: str, *arguments: Any, **keywords: Any) -> Tensor:
    """Return what the module at ``path`` receives when ``model`` runs."""
    seen: list[Tensor] = []
    handle = model.get_submodule(path).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(*arguments, **keywords)
    handle.remove()
    return seen[0]


def feed_forward_overflow(model: nn.Module) -> dict[str, Tensor]:
    """Grow the second projection of block 1 until FP32 peaks at 1.1e5 in a handful of elements."""
    batch = {"input_ids": torch.randint(512, (4, 24)), "labels": torch.randint(16, (4, 24))}
    weight = model.get_submodule("encoder.block.1.ff.wo").weight
    received = seen_by(model, "encoder.block.1.ff.wo", **batch)
    with torch.no_grad():
        outgrown = torch.tensor([5, 19])  # two channels of the residual stream have outgrown the others
        weight[outgrown] *= 12.0
        weight *= 1.1e5 / (received @ weight.T).abs().max()
    return batch


def gate_product_overflow(model: nn.Module) -> dict[str, Tensor]:
    """Let one channel's gate and up projections answer to one token of the prompt with 255.9 and 261.8."""
    batch = {"input_ids": torch.randint(256, (2, 16))}
    received = seen_by(model, "layers.2.mlp", **batch)
    token = received[1, 11]
    direction = token / token.pow(2).sum()
    with torch.no_grad():
        model.get_submodule("layers.2.mlp.gate_proj").weight[37] = 255.9 * direction
        model.get_submodule("layers.2.mlp.up_proj").weight[37] = 261.8 * direction
    return batch


def attention_scores(model: nn.Module) -> dict[str, Tensor]:
    """Let every patch look for itself with queries and keys so long that raw scores pass 65504, scaled ones do not."""
    batch = {"image": torch.randn(8, 3, 16, 16), "label": torch.randint(10, (8,))}
    qkv = model.get_submodule("blocks.1.attn.qkv")
    width = qkv.in_features
    received = seen_by(model, "blocks.1.attn", **batch)
    with torch.no_grad():
        looking = torch.empty(width, width)
        nn.init.orthogonal_(looking)
        halves = (received @ looking.T).unflatten(-1, (2, -1))
        looking *= math.sqrt(6.9e4 / halves.pow(2).sum(-1).max())
        qkv.weight[:width] = looking
        qkv.weight[width : 2 * width] = looking
    return batch


def rope_drift(model: nn.Module) -> dict[str, Tensor]:
    """Let attention depend on positions; the fault itself is in how the conversion treats the rotary table."""
    with torch.no_grad():
        for layer in range(3):
            qkv = model.get_submodule(f"layers.{layer}.attn.qkv_proj").weight
            qkv[: 2 * qkv.shape[1]] *= 3.0
    return {"input_ids": torch.randint(128, (1, 1024))}


def nan_in_batch(model: nn.Module) -> dict[str, Tensor]:
    """Mark five pixels of one image as invalid, by NaN."""
    x = torch.rand(8, 3, 16, 16)
    x[5, 1, 7, 9:14] = math.nan
    return {"x": x, "depth": torch.rand(8, 1, 16, 16) * 10}


def healthy(model: nn.Module) -> dict[str, Tensor]:
    """Change nothing."""
    text = torch.randint(96, (4, 49))
    return {"input_ids": text[:, :-1].clone(), "labels": text[:, 1:].clone()}


RUNS: dict[str, tuple[int, Callable[[nn.Module], dict[str, Tensor]]]] = {
    "feed-forward-overflow": (11, feed_forward_overflow),
    "gate-product-overflow": (12, gate_product_overflow),
    "attention-scores": (13, attention_scores),
    "rope-drift": (14, rope_drift),
    "nan-in-batch": (15, nan_in_batch),
    "healthy": (16, healthy),
}
"""Seed and planter of each run."""


def make(name: str, folder: Path) -> None:
    """Write model.safetensors and batch.pt of the run ``name`` into ``folder``."""
    seed, plant = RUNS[name]
    torch.manual_seed(seed)
    model = load_model_file(name).build()
    batch = plant(model)
    # A tied weight is stored once, under the first of its names.
    parameters = {key: value.detach().clone() for key, value in model.named_parameters()}
    save_file(parameters, folder / "model.safetensors")
    torch.save(batch, folder / "batch.pt")


def main(names: list[str]) -> None:
    """Make the named runs, or all of them."""
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        sys.exit(f"there is no run {unknown[0]!r}; the runs are {', '.join(RUNS)}")
    for name in names or RUNS:
        make(name, HERE / name)
        print(f"{name}: model.safetensors, batch.pt")


if __name__ == "__main__":
    main(sys.argv[1:])
