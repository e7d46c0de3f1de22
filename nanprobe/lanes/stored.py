"""Looking at what is stored before anything runs: the batch's fields, the model's parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanprobe.formats import by_name
from nanprobe.lanes.measures import bad_detail
from nanprobe.lanes.trace import BadDetail
from nanprobe.numerics.stats import TensorStats, is_finite, measure, plain_values
from nanprobe.numerics.tree import named_tensors

__all__ = ["StoredTensor", "survey"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """What one tensor of the batch or the model holds before the replay.

    ``kind`` is "input", "parameter" or "buffer"; ``name`` the batch field's path or the parameter's name; ``owner`` and
    ``class_`` are those of the module that holds it (None for a batch field). ``only_mask`` says that its finite values
    are all zero, as in an additive mask. ``over`` counts, by format, finite elements that a cast turns into Inf;
    ``rounded`` counts, by format, elements that a cast changes although all are integers (batch fields only).
    """

    kind: str
    name: str
    owner: str | None
    class_: str | None
    stats: TensorStats
    detail: BadDetail | None
    only_mask: bool
    over: dict[str, tuple[int, tuple[int, ...]]]
    rounded: dict[str, tuple[int, tuple[int, ...]]]


def _first(mask: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    count = int(torch.count_nonzero(mask))
    flat = int(torch.nonzero(mask.reshape(-1))[0])
    where = torch.unravel_index(torch.tensor(flat), mask.shape) if mask.dim() else ()
    return count, tuple(int(i) for i in where)


def _stored(
    kind: str,
    name: str,
    owner: str | None,
    class_: str | None,
    tensor: torch.Tensor,
    formats: tuple[str, ...],
    batch: tuple[int | None, int],
) -> StoredTensor | None:
    """Look at one tensor; None when it is finite and nothing is cast, so that there is nothing to say of it."""
    if not formats and is_finite(tensor):
        return None
    stats = measure(tensor)
    over: dict[str, tuple[int, tuple[int, ...]]] = {}
    rounded: dict[str, tuple[int, tuple[int, ...]]] = {}
    dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_complex()
    for wanted in formats:
        fmt = by_name(wanted)
        if not dense or stats.absmax is None:
            continue
        if stats.absmax >= fmt.overflow_threshold:
            values = tensor.detach()
            over[wanted] = _first(torch.isfinite(values) & (values.abs() >= fmt.overflow_threshold))
        elif kind == "input" and stats.absmax > fmt.integer_limit and _all_integers(tensor):
            values = tensor.detach()
            changed = values != values.to(getattr(torch, str(fmt.dtype))).to(values.dtype)
            if bool(changed.any()):
                rounded[wanted] = _first(changed)
    return StoredTensor(
        kind=kind,
        name=name,
        owner=owner,
        class_=class_,
        stats=stats,
        detail=bad_detail("", tensor, batch_size=batch[0], batch_dim=batch[1]) if stats.bad else None,
        only_mask=stats.finite == stats.zero and stats.neginf > 0,
        over=over,
        rounded=rounded,
    )


def _all_integers(tensor: torch.Tensor) -> bool:
    values = plain_values(tensor)
    return bool((values == values.round()).all())


def survey(
    model: nn.Module,
    batch: Any,
    *,
    formats: tuple[str, ...] = (),
    kept: tuple[str, ...] = (),
    batch_size: int | None = None,
    batch_dim: int = 0,
) -> Iterator[StoredTensor]:
    """Yield what floating tensors of the batch and the model hold; the batch first, then parameters and buffers.

    Finite tensors that nothing casts are left out.

    ``formats`` are those that everything is going to be cast to; tensors of modules under ``kept`` paths are not cast.
    """
    for path, tensor in named_tensors(batch):
        if tensor.is_floating_point() or tensor.is_complex():
            found = _stored("input", path, None, None, tensor, formats, (batch_size, batch_dim))
            if found is not None:
                yield found
    seen: set[int] = set()
    for kind in ("parameter", "buffer"):
        for module_path, module in model.named_modules():
            is_kept = any(module_path == k or module_path.startswith(f"{k}.") or k == "" for k in kept)
            members = (
                module.named_parameters(recurse=False) if kind == "parameter" else module.named_buffers(recurse=False)
            )
            for name, member in members:
                if id(member) in seen or not (member.is_floating_point() or member.is_complex()) or member.is_meta:
                    continue
                seen.add(id(member))
                full = f"{module_path}.{name}" if module_path else name
                cast = () if is_kept else formats
                found = _stored(kind, full, module_path, type(module).__name__, member, cast, (None, 0))
                if found is not None:
                    yield found
