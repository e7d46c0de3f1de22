"""A checkpoint's weights in a model: mapped where types agree, converted where they do not, tied where the model ties.

``load_state_dict(assign=True)`` puts the checkpoint's tensors into the model and runs the model's own loading hooks;
afterwards every parameter gets its old object back with the new data in it. So tied weights stay tied, references that
a module keeps to its parameters stay right, ``requires_grad`` stays as it was, and a parameter keeps its type.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from nanprobe.checkpoints.locate import SHARD_NAME
from nanprobe.errors import UsageError
from nanprobe.inputs.converted_layout import in_model_layout
from nanprobe.inputs.state_dict import StateDict, read_state_dict

__all__ = ["LoadResult", "StateDict", "load_into", "read_state_dict"]

_SHOWN = 10
"""Keys that a message names before it counts the rest."""

_TRIED = 64
"""Prefixes that are tried for a hint."""

_EXTRA_STATE = "_extra_state"
"""Suffix of state that modules keep beside tensors; PyTorch's name for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """What loading did: keys without a counterpart on either side, bytes that stay mapped from the files.

    ``key`` is where in the checkpoint the state dict lay, ``converted`` the number of tensors that were converted to
    the model's type, and ``notes`` sentences for the user.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mapped_bytes: int = 0
    key: str = ""
    converted: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place in the model that holds a tensor: its key, its module and name there, and what it held before."""

    key: str
    module: nn.Module
    name: str
    before: torch.Tensor


def load_into(model: nn.Module, state_dict: Mapping[str, torch.Tensor], *, strict: bool = True) -> LoadResult:
    """Put ``state_dict`` into ``model`` without copying what can stay mapped.

    A missing key that is tied to a loaded one is fine. UsageError when shapes differ, when nothing matches, and, with
    ``strict``, when a key is missing or unexpected; the message names them and what would help.
    """
    path = getattr(state_dict, "path", "the state dict")
    slots = _slots(model)
    by_key = {slot.key: slot for slot in slots}
    notes = list(getattr(state_dict, "notes", ()))
    held = state_dict
    lacking = _lacking(state_dict, slots)
    if lacking:
        converted, changed = in_model_layout(model, state_dict)
        if changed and _lacking(converted, slots) < lacking:
            held = converted
            notes.append(
                "transformers converted the checkpoint to the model's layout; these weights are held in memory"
            )
    _refuse_misfits(held, by_key, path)
    prepared, kinds = _converted(held, by_key, state_dict)
    shared = _shared_before(slots)
    missing_keys, unexpected_keys = _load(model, prepared, list(by_key), path)
    loaded = _restore(slots, shared, notes)
    loaded |= {id(slot.before) for slot in slots if slot.key in prepared and slot.key not in missing_keys}
    missing = tuple(
        key
        for key in missing_keys
        if not key.endswith(_EXTRA_STATE) and not (key in by_key and id(by_key[key].before) in loaded)
    )
    own = _computed_buffers(model)
    computed = [key for key in unexpected_keys if key in own]
    if computed:
        notes.append(
            f"the checkpoint holds buffers that the model makes itself; they were left alone: {_listed(computed)}"
        )
    unexpected = tuple(key for key in unexpected_keys if key not in computed and not key.endswith(_EXTRA_STATE))
    if (missing or unexpected) and (strict or not loaded):
        raise UsageError(_misfit(path, missing, unexpected, state_dict, by_key, any_loaded=bool(loaded)))
    for (source, target), count in sorted(kinds.items()):
        notes.append(f"{count} tensors were converted from {source} to {target}, the model's type")
    mapped = getattr(state_dict, "mapped", {})
    addresses = {slot_tensor.untyped_storage().data_ptr() for slot_tensor in _tensors(slots)}
    return LoadResult(
        missing=missing,
        unexpected=unexpected,
        mapped_bytes=sum(size for address, size in mapped.items() if address in addresses),
        key=getattr(state_dict, "key", ""),
        converted=sum(kinds.values()),
        notes=tuple(notes),
    )


def _load(
    model: nn.Module, prepared: StateDict, wanted: Sequence[str], path: str
) -> tuple[Sequence[str], Sequence[str]]:
    """Run the model's own ``load_state_dict``; return the keys it missed and those it did not expect.

    A model that overrides it without ``assign`` copies the weights into its own memory.
    """
    accepted = inspect.signature(model.load_state_dict).parameters
    assigns = "assign" in accepted or any(kind.kind is kind.VAR_KEYWORD for kind in accepted.values())
    options: dict[str, bool] = {"strict": False, **({"assign": True} if assigns else {})}
    try:
        outcome = model.load_state_dict(prepared, **options)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # The first line names the class; each of the others is one misfit.
        faults = lines[1:] or lines or [type(error).__name__]
        raise UsageError(f"checkpoint {path} does not fit the model: {_listed(faults, ' ')}") from None
    if hasattr(outcome, "missing_keys"):
        return outcome.missing_keys, outcome.unexpected_keys
    names = set(wanted)
    return [key for key in wanted if key not in prepared], [key for key in prepared if key not in names]


def _lacking(state_dict: Mapping[str, torch.Tensor], slots: Sequence[_Slot]) -> int:
    """Return how many weights of the model are under none of their names in the state dict."""
    held = {id(slot.before) for slot in slots if slot.key in state_dict}
    return len({id(slot.before) for slot in slots} - held)


def _slots(model: nn.Module) -> list[_Slot]:
    """Return every parameter and persistent buffer, also those that several keys name."""
    slots: list[_Slot] = []
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            slots.append(_Slot(dot + name, module, name, parameter))
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                slots.append(_Slot(dot + name, module, name, buffer))
    return slots


def _computed_buffers(model: nn.Module) -> set[str]:
    """Return the names of buffers outside the state dict; an older version of the model may have saved them."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


def _tensors(slots: Iterable[_Slot]) -> list[torch.Tensor]:
    return [tensor for slot in slots if not _empty(tensor := getattr(slot.module, slot.name))]


def _empty(tensor: torch.Tensor) -> bool:
    """Return whether there is no memory behind ``tensor`` to look at."""
    return nn.parameter.is_lazy(tensor) or tensor.is_meta or tensor.numel() == 0 or tensor.layout != torch.strided


def _refuse_misfits(state_dict: Mapping[str, torch.Tensor], by_key: dict[str, _Slot], path: str) -> None:
    faults: list[str] = []
    for key, slot in by_key.items():
        tensor = state_dict.get(key)
        if tensor is None or nn.parameter.is_lazy(slot.before):
            continue
        wanted = tuple(slot.before.shape)
        # PyTorch still takes the one-element vectors that versions before 0.4 saved for scalars.
        if tuple(tensor.shape) != wanted and not (wanted == () and tuple(tensor.shape) == (1,)):
            faults.append(f"{key} is {list(tensor.shape)} in the checkpoint and {list(wanted)} in the model")
        elif tensor.is_complex() and not slot.before.is_complex():
            faults.append(f"{key} is complex in the checkpoint and real in the model")
    if faults:
        raise UsageError(f"checkpoint {path} does not fit the model: {_listed(faults, '; ')}")


def _converted(
    state_dict: Mapping[str, torch.Tensor], by_key: dict[str, _Slot], source: Mapping[str, torch.Tensor]
) -> tuple[StateDict, dict[tuple[str, str], int]]:
    """Return the state dict in the model's types, and how many tensors went from which type to which.

    The versions of modules are those of ``source``, the state dict as it was read.
    """
    prepared = StateDict(dict(state_dict), getattr(source, "path", ""))
    prepared._metadata = getattr(source, "_metadata", {})
    kinds: dict[tuple[str, str], int] = {}
    for key, tensor in state_dict.items():
        slot = by_key.get(key)
        if slot is not None and tensor.dtype != slot.before.dtype:
            prepared[key] = tensor.to(slot.before.dtype)
            kind = (str(tensor.dtype).removeprefix("torch."), str(slot.before.dtype).removeprefix("torch."))
            kinds[kind] = kinds.get(kind, 0) + 1
    return prepared, kinds


def _shared_before(slots: Sequence[_Slot]) -> set[int]:
    """Return the identities of tensors that are different objects over one storage; they must keep that storage."""
    owners: dict[int, set[int]] = {}
    for slot in slots:
        if not _empty(slot.before):
            owners.setdefault(slot.before.untyped_storage().data_ptr(), set()).add(id(slot.before))
    return {identity for group in owners.values() if len(group) > 1 for identity in group}


def _restore(slots: list[_Slot], shared: set[int], notes: list[str]) -> set[int]:
    """Put the old objects back with the new data in them; return the identities of those that were loaded."""
    groups: dict[int, list[_Slot]] = {}
    for slot in slots:
        groups.setdefault(id(slot.before), []).append(slot)
    loaded: set[int] = set()
    taken: dict[int, list[tuple[int, int]]] = {}
    for identity, group in groups.items():
        found = [(slot, tensor) for slot in group if (tensor := getattr(slot.module, slot.name)) is not slot.before]
        if not found:
            continue
        loaded.add(identity)
        # Of several tensors for one weight the last stays, as when they are copied one after the other.
        last, tensor = found[-1]
        differing = [slot.key for slot, other in found[:-1] if not _same(other, tensor)]
        if differing:
            notes.append(
                f"{_listed(differing)} and {last.key} are one weight in the model but differ in the checkpoint; "
                f"{last.key} was taken"
            )
        before = last.before
        if before.is_meta:
            for slot in group:
                setattr(slot.module, slot.name, tensor)
            continue
        for slot in group:
            setattr(slot.module, slot.name, before)
        with torch.no_grad():
            if identity in shared:
                before.copy_(tensor)
            else:
                before.data = _own(tensor.detach(), before, taken)
    return loaded


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.data_ptr() == second.data_ptr() and first.stride() == second.stride():
        return True
    return torch.equal(first.detach().contiguous().view(torch.uint8), second.detach().contiguous().view(torch.uint8))


def _own(tensor: torch.Tensor, before: torch.Tensor, taken: dict[int, list[tuple[int, int]]]) -> torch.Tensor:
    """Return ``tensor`` in the type, on the device and in the memory layout of ``before``, overlapping no other weight.

    A model whose weights are not tied must not become so because the checkpoint's happen to share memory.
    """
    if nn.parameter.is_lazy(before):
        return tensor
    tensor = tensor.to(dtype=before.dtype, device=before.device)
    same_layout = (tensor.is_contiguous() and before.is_contiguous()) or tensor.stride() == before.stride()
    if not same_layout:
        return torch.empty_like(before).copy_(tensor)
    if tensor.numel() == 0:
        return tensor
    begin = tensor.data_ptr()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    end = begin + reach * tensor.element_size()
    ranges = taken.setdefault(tensor.untyped_storage().data_ptr(), [])
    if any(begin < other_end and other_begin < end for other_begin, other_end in ranges):
        return tensor.clone()
    ranges.append((begin, end))
    return tensor


def _listed(items: Sequence[str], separator: str = ", ") -> str:
    shown = separator.join(items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown}{separator}and {len(items) - _SHOWN:,} more"


def _misfit(
    path: str,
    missing: tuple[str, ...],
    unexpected: tuple[str, ...],
    state_dict: Mapping[str, torch.Tensor],
    by_key: dict[str, _Slot],
    *,
    any_loaded: bool,
) -> str:
    hint = _prefix_hint(list(state_dict), list(by_key)) or _shard_hint(path)
    if not any_loaded:
        first = next(iter(state_dict), None)
        example = f" (it has {first!r}, the model wants {missing[0]!r})" if first is not None and missing else ""
        return f"nothing in checkpoint {path} matches the model{example}{hint}"
    parts = []
    if missing:
        parts.append(f"it lacks {len(missing):,} of {len(by_key):,} keys of the model: {_listed(missing)}")
    if unexpected:
        parts.append(f"{len(unexpected):,} of its {len(state_dict):,} keys are not in the model: {_listed(unexpected)}")
    tail = hint or "; set `checkpoint.strict: false` to load what fits"
    return f"checkpoint {path} does not fit the model: {'; '.join(parts)}{tail}"


def _shard_hint(path: str) -> str:
    """Return what to say when the checkpoint is one numbered shard of several, "" when it is not."""
    found = SHARD_NAME.fullmatch(os.path.basename(path))
    if found is None or int(found[3]) < 2:
        return ""
    return f"; it is shard {int(found[2])} of {int(found[3])}: give the folder or the index file"


def _prefix_hint(held: list[str], wanted: list[str]) -> str:
    """Return what to say when the names would fit with a prefix taken off, "" when they would not."""
    names = set(wanted)
    fitting = sum(1 for key in held if key in names)
    starts: dict[str, None] = {}
    for key in held:
        parts = key.split(".")
        for length in range(1, min(len(parts), 4)):
            starts[".".join(parts[:length]) + "."] = None
        if len(starts) > _TRIED:
            break
    best, most = "", fitting
    for start in starts:
        count = sum(1 for key in held if key.startswith(start) and key[len(start) :] in names)
        if count > most:
            best, most = start, count
    if best:
        return f"; with `checkpoint.strip_prefix: {best}` {most:,} of {len(held):,} keys fit"
    have = set(held)
    for start in dict.fromkeys(key.split(".", 1)[0] + "." for key in wanted if "." in key):
        count = sum(1 for key in wanted if key.startswith(start) and key[len(start) :] in have)
        if count > fitting:
            return f"; the model's own keys begin with `{start}`: let the factory return the part that was saved"
    return ""
