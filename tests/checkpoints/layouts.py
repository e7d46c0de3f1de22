"""Checkpoints as trainers lay them out, small and made in the test: by the library where PyTorch has it, by hand else.

What is made by hand repeats the files of DeepSpeed 0.19.8, Megatron-core 0.16.1, accelerate 1.15 and NeMo as those
libraries wrote them for a small model: same names, keys, nesting and dtypes.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import math
import pickle
import random
import sys
import tarfile
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

SHAPES = {"emb.weight": (7, 5), "fc.weight": (4, 5), "fc.bias": (4,), "norm.weight": (4,), "norm.bias": (4,)}
"""Parameters of the small model."""


def parameters(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random float32 values for every parameter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Net(torch.nn.Module):
    """The small model, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(7, 5)
        self.fc = torch.nn.Linear(5, 4)
        self.norm = torch.nn.LayerNorm(4)
        self.register_buffer("mask", torch.ones(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(self.emb(ids)))


def trained() -> tuple[Net, torch.optim.Optimizer]:
    """The model after one step of AdamW."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.tensor([1, 2])).pow(2).sum().backward()
    optimizer.step()
    return model, optimizer


# Distributed checkpoints


def save_dcp(folder: Path, state: dict[str, Any], **options: Any) -> Path:
    """Write a distributed checkpoint with one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True, **options)
    return folder


def save_dcp_training(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write model, optimizer and counters as torchtitan does; return the folder and the values by name."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = trained()
    weights, states = get_state_dict(model, optimizer)
    save_dcp(folder, {"model": weights, "optimizer": states, "train_state": {"step": 5}})
    expected = {name: value.detach() for name, value in weights.items()}
    for name, fields in states["state"].items():
        expected.update({f"{name}.{field}": value for field, value in fields.items()})
    return folder, expected


def split_dcp(folder: Path, rows: int = 2) -> Path:
    """Write one tensor of ``rows`` blocks in two files, as two ranks would: a metadata file made from PyTorch's own."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    folder.mkdir(parents=True, exist_ok=True)
    whole = torch.arange(rows * 3 * 4.0).reshape(rows * 3, 4)
    chunks, places = [], {}
    for number in range(rows):
        start = torch.Size((number * 3, 0))
        buffer = io.BytesIO()
        torch.save(whole[number * 3 : number * 3 + 3].clone(), buffer)
        name = f"__{number}_0.distcp"
        (folder / name).write_bytes(b"x" * 5 + buffer.getvalue())
        chunks.append(ChunkStorageMetadata(offsets=start, sizes=torch.Size((3, 4))))
        places[MetadataIndex("w", start, number)] = _StorageInfo(name, 5, len(buffer.getvalue()))
    described = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size((rows * 3, 4)), chunks)
    metadata = Metadata({"w": described}, planner_data={"w": ("w",)}, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def edit_metadata(folder: Path, change: Any) -> None:
    """Load ``.metadata`` as PyTorch does, let ``change`` alter it, write it back."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def save_megatron(root: Path, iteration: int = 5) -> Path:
    """Write a ``torch_dist`` save under a root folder with the pointer to it."""
    folder = root / f"iter_{iteration:07d}"
    values = parameters()
    state: dict[str, Any] = dict(values)
    state.update({f"optimizer.state.exp_avg.{name}": torch.ones_like(value) for name, value in values.items()})
    state.update({f"optimizer.state.fp32_param.{name}": value.clone() for name, value in values.items()})
    save_dcp(folder, state)
    common = {
        "args": argparse.Namespace(bf16=False, fp16=True, lr=0.001),
        "iteration": iteration,
        "optimizer": {"grad_scaler": {"scale": torch.tensor([65536.0]), "growth_tracker": torch.tensor([3])}},
        "opt_param_scheduler": {"max_lr": 0.001, "num_steps": 40},
    }
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return root


def save_megatron_legacy(root: Path, ranks: int = 2) -> Path:
    """Write one file for each tensor-parallel rank."""
    for rank in range(ranks):
        folder = root / "iter_0000005" / f"mp_rank_{rank:02d}"
        folder.mkdir(parents=True)
        state = {
            "args": argparse.Namespace(tensor_model_parallel_size=ranks, pipeline_model_parallel_size=1),
            "iteration": 5,
            "model": {"language_model": {"embedding": {"word_embeddings": {"weight": torch.ones(3, 2)}}}},
        }
        torch.save(state, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return root


# DeepSpeed. The stand-ins for its classes carry its names, so that the pickles do.


def _stand_in(module: str, name: str) -> type:
    made = type(name, (), {"__module__": module, "__qualname__": name})
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:length]), types.ModuleType(".".join(parts[:length])))
    setattr(sys.modules[module], name, made)
    return made


def _object(cls: type, **state: Any) -> Any:
    made = cls()
    made.__dict__.update(state)
    return made


def save_deepspeed(root: Path, stage: int, *, world: int = 2, fp16: bool = True, mappings: bool = True) -> Path:
    """Write a ZeRO save of ``stage`` by ``world`` processes with a pointer; moments are 2 and 3 times the weights."""
    before = dict(sys.modules)
    try:
        return _save_deepspeed(root, stage, world, fp16, mappings)
    finally:
        for name in set(sys.modules) - set(before):
            if name.startswith("deepspeed"):
                del sys.modules[name]


def _save_deepspeed(root: Path, stage: int, world: int, fp16: bool, mappings: bool) -> Path:
    scaler_class = _stand_in("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler")
    slice_class = _stand_in("deepspeed.utils.tensor_fragment", "fragment_address")
    folder = root / "global_step2"
    folder.mkdir(parents=True)
    values = parameters()
    low = torch.float16 if fp16 else torch.bfloat16
    module: dict[str, torch.Tensor] = {"mask": torch.ones(3)}
    for name, value in values.items():
        module[name] = torch.empty(0, dtype=low) if stage == 3 else value.to(low)
    model_state = {
        "module": module,
        "buffer_names": ["mask"],
        "optimizer": None,
        "param_shapes": [{name: torch.Size(shape) for name, shape in SHAPES.items()}],
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "global_steps": 2,
        "skipped_steps": 0,
        "dp_world_size": world,
        "mp_world_size": 1,
    }
    if stage == 3:
        for rank in range(world):
            torch.save(model_state, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        parts, slices = _partitions_stage3(values, world)
    else:
        torch.save(model_state, folder / "mp_rank_00_model_states.pt")
        parts, slices = _partitions_stage12(values, world)
    for rank in range(world):
        states = {
            "step": torch.tensor(2.0),
            "exp_avg": parts[rank] * 2,
            "exp_avg_sq": parts[rank].square() * 3,
        }
        group = {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": [0]}
        scaler = _object(
            scaler_class, cur_scale=4096.0, cur_iter=2, last_overflow_iter=-1, scale_factor=2.0, scale_window=1000,
            min_scale=1, delayed_shift=1, cur_hysteresis=1,
        )  # fmt: skip
        inner = {"state": {0: states}, "param_groups": [group]}
        state: dict[str, Any] = {"loss_scaler": scaler, "dynamic_loss_scale": True, "overflow": False}
        if stage == 3:
            state |= {"zero_stage": 3, "partition_count": world, "optimizer_state_dict": inner}
            state["fp32_flat_groups"] = [parts[rank]]
        else:
            state |= {"zero_stage": stage, "partition_count": [world], "base_optimizer_state": inner}
            state["single_partition_of_fp32_groups"] = [parts[rank]]
            state["group_paddings"] = [0]
            if mappings:
                state["param_slice_mappings"] = [
                    {
                        name: _object(slice_class, numel=size, start=start)
                        for name, (start, size) in slices[rank].items()
                    }
                ]
        name = f"{'' if fp16 else 'bf16_'}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state, "ds_version": "0.19.8"}, folder / name)
    (root / "latest").write_text("global_step2")
    (root / "zero_to_fp32.py").write_text("print()\n")
    return root


Slices = list[dict[str, tuple[int, int]]]


def _partitions_stage12(values: dict[str, torch.Tensor], world: int) -> tuple[list[torch.Tensor], Slices]:
    flat = torch.cat([value.flatten() for value in values.values()])
    share = math.ceil(flat.numel() / (2 * world)) * 2
    padded = torch.cat([flat, torch.zeros(share * world - flat.numel())])
    slices: Slices = [{} for _ in range(world)]
    position = 0
    for name, value in values.items():
        for rank in range(world):
            low, high = max(position, rank * share), min(position + value.numel(), (rank + 1) * share)
            if low < high:
                slices[rank][name] = (low - rank * share, high - low)
        position += value.numel()
    return [part.clone() for part in padded.split(share)], slices


def _partitions_stage3(values: dict[str, torch.Tensor], world: int) -> tuple[list[torch.Tensor], Slices]:
    parts: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for value in values.values():
        share = math.ceil(value.numel() / world)
        padded = torch.cat([value.flatten(), torch.zeros(share * world - value.numel())])
        for rank, part in enumerate(padded.split(share)):
            parts[rank].append(part)
    return [torch.cat(part) for part in parts], []


def save_universal(root: Path) -> Path:
    """Write a universal checkpoint: a folder for each parameter."""
    folder = root / "global_step2_universal"
    for name, value in parameters().items():
        inner = folder / "zero" / name
        inner.mkdir(parents=True)
        torch.save({"param": value, "cat_dim": 0}, inner / "fp32.pt")
        torch.save({"param": value * 2, "cat_dim": 0}, inner / "exp_avg.pt")
        torch.save({"param": value.square() * 3, "cat_dim": 0}, inner / "exp_avg_sq.pt")
        torch.save(torch.tensor(2.0), inner / "step.pt")
    torch.save({"param_groups": [{"lr": 0.001, "params": [0]}]}, folder / "zero" / "optimizer_state.pt")
    module = {name: value.to(torch.bfloat16) for name, value in parameters().items()}
    torch.save({"module": module}, folder / "mp_rank_00_model_states.pt")
    (root / "latest_universal").write_text("global_step2_universal")
    return root


# Trainers


def save_trainer(folder: Path, *, log: list[dict[str, Any]] | None = None) -> Path:
    """Write the folder of a Hugging Face Trainer: weights, optimizer with two groups, states, log."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model(torch.tensor([1, 2])).pow(2).sum().backward()
    optimizer.step()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    scaler = {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    torch.save({**scaler, "_growth_tracker": 1}, folder / "scaler.pt")
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    torch.save(rng, folder / "rng_state.pth")
    history = [{"epoch": 0.5, "loss": 1.25, "grad_norm": 2.0, "learning_rate": 0.01, "step": 1}] if log is None else log
    state = {"epoch": 1.0, "global_step": 2, "best_metric": None, "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / "config.json").write_text(json.dumps({"model_type": "net", "tie_word_embeddings": False}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("# model\n")
    return folder


def save_accelerate(folder: Path) -> Path:
    """Write what ``Accelerator.save_state`` writes for two processes."""
    folder.mkdir(parents=True, exist_ok=True)
    model, optimizer = trained()
    save_file(model.state_dict(), folder / "model.safetensors")
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save({"last_epoch": 1, "_last_lr": [0.01]}, folder / "scheduler.bin")
    for rank in range(2):
        states = {
            "step": 1,
            "random_state": random.getstate(),
            "numpy_random_seed": np.random.get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        }
        torch.save(states, folder / f"random_states_{rank}.pkl")
    return folder


def lightning_state() -> dict[str, Any]:
    """The keys of a Lightning checkpoint in 16-bit precision."""
    model, optimizer = trained()
    return {
        "epoch": 1,
        "global_step": 10,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint": {"kth_value": torch.tensor(float("inf")), "best_model_score": float("inf")}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [{"last_epoch": 1, "_last_lr": [0.01]}],
        "MixedPrecision": {"scale": 0.5, "growth_factor": 2.0, "_growth_tracker": 0},
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.01},
    }


def save_nemo(path: Path, *, compressed: bool = False) -> Path:
    """Write a NeMo archive: a configuration and weights."""
    buffer = io.BytesIO()
    torch.save(parameters(), buffer)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, data in (("./model_config.yaml", b"name: x\n"), ("./model_weights.ckpt", buffer.getvalue())):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    path.write_bytes(gzip.compress(archive.getvalue()) if compressed else archive.getvalue())
    return path
