"""Looking at what is stored before anything runs: the batch's fields, the model's parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanprobe.errors import UsageError
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
    are all zero, as in an additive mask. ``over`` tells, by format, the finite elements that a cast turns into Inf;
    ``rounded`` tells, by format, those that a cast changes although all are integers (batch fields only).
    ``owners`` are all modules that hold the tensor, when it is tied.
    """

    kind: str
    name: str
    owner: str | None
    class_: str | None
    stats: TensorStats
    detail: BadDetail | None
    only_mask: bool
    over: dict[str, BadDetail]
    rounded: dict[str, BadDetail]
    owners: tuple[str, ...] = ()


def _stored(
    kind: str,
    name: str,
    owner: str | None,
    class_: str | None,
    tensor: torch.Tensor,
    formats: tuple[str, ...],
    batch: tuple[int | None, int],
    owners: tuple[str, ...] = (),
) -> StoredTensor | None:
    """Look at one tensor; None when it is finite and nothing is cast, so that there is nothing to say of it."""
    if not formats and is_finite(tensor):
        return None
    stats = measure(tensor)
    over: dict[str, BadDetail] = {}
    rounded: dict[str, BadDetail] = {}

    def told(changed: torch.Tensor) -> BadDetail | None:
        """Describe the elements that a cast changes."""
        marked = torch.where(changed, torch.nan, 0.0)
        return bad_detail("", marked, batch_size=batch[0], batch_dim=batch[1])

    dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_complex()
    for wanted in formats:
        fmt = by_name(wanted)
        if not dense or stats.absmax is None:
            continue
        if stats.absmax >= fmt.overflow_threshold:
            values = tensor.detach()
            detail = told(torch.isfinite(values) & (values.abs() >= fmt.overflow_threshold))
            if detail is not None:
                over[wanted] = detail
        elif kind == "input" and stats.absmax > fmt.integer_limit and _all_integers(tensor):
            values = tensor.detach()
            detail = told(values != values.to(getattr(torch, str(fmt.dtype))).to(values.dtype))
            if detail is not None:
                rounded[wanted] = detail
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
        owners=owners,
    )


def _all_integers(tensor: torch.Tensor) -> bool:
    values = plain_values(tensor)
    return bool((values == values.round()).all())


def _owners(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Return, by the identity of each parameter and buffer, the paths of the modules that hold it."""
    found: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for member in (*module._parameters.values(), *module._buffers.values()):
            if member is not None:
                found.setdefault(id(member), []).append(path)
    return {identity: tuple(paths) for identity, paths in found.items()}


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

    Finite tensors that nothing casts are left out. UsageError for a parameter of a lazy module without a shape.

    ``formats`` are those that everything is going to be cast to; tensors of modules under ``kept`` paths are not cast.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise UsageError(
                f"model: the lazy parameter {name} has no shape yet; call the model once before replaying it"
            )
    for path, tensor in named_tensors(batch):
        if tensor.is_floating_point() or tensor.is_complex():
            found = _stored("input", path, None, None, tensor, formats, (batch_size, batch_dim))
            if found is not None:
                yield found
    owners = _owners(model)
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
                class_ = type(module).__name__
                found = _stored(kind, full, module_path, class_, member, cast, (None, 0), owners[id(member)])
                if found is not None:
                    yield found
