"""Files for the tests, made by the libraries that users make theirs with."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)

FLAT = {"fc.weight": torch.arange(12.0).reshape(3, 4), "fc.bias": torch.tensor([1.0, -2.0, 0.5])}
"""A small state dict."""


def every_dtype() -> dict[str, torch.Tensor]:
    """Tensors of every element type and of every odd shape that a checkpoint may hold."""
    generator = torch.Generator().manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    for dtype in DTYPES:
        values = torch.randn(5, 3, generator=generator) * 10
        name = str(dtype).removeprefix("torch.")
        if dtype.is_complex:
            made[name] = torch.complex(values, -values).to(dtype)
        elif dtype.is_floating_point or dtype.is_signed or dtype == torch.bool:
            made[name] = values.to(dtype)
        else:
            made[name] = values.abs().to(torch.int64).to(dtype)
    made["scalar"] = torch.tensor(3.5)
    made["empty"] = torch.empty(0, 4)
    made["special"] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-42])
    return made


def with_views() -> dict[str, torch.Tensor]:
    """Tensors that are views: transposed, offset, expanded, tied."""
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "transposed": base.t(),
        "offset": base[1:3, 2:5],
        "strided": base[::2, ::3],
        "expanded": torch.tensor([7.0]).expand(3, 2),
        "first": base,
        "tied": base,
    }


def safetensors_dtypes() -> dict[str, torch.Tensor]:
    """What of :func:`every_dtype` the safetensors package can write."""
    return {name: tensor for name, tensor in every_dtype().items() if tensor.dtype != torch.complex128}


def rezip(source: Path, target: Path, method: int = zipfile.ZIP_DEFLATED) -> None:
    """Copy a zip member by member with another compression."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))


def save_sharded(
    folder: Path, tensors: dict[str, torch.Tensor], *, suffix: str = ".safetensors", shards: int = 2
) -> Path:
    """Write ``tensors`` into numbered shards with an index; return the index's path."""
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for number in range(shards):
        part = {name: tensors[name] for name in names[number::shards]}
        file = f"{stem}-{number + 1:05d}-of-{shards:05d}{suffix}"
        if suffix == ".safetensors":
            save_file(part, folder / file)
        else:
            torch.save(part, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = folder / f"{stem}{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    return index


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors agree in type, shape and every bit."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    left, right = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (first, second))
    return torch.equal(left, right)
