"""Rules about tensors beside each other: ties, averages, storages, declared types."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from nanprobe.checkpoints.dtypes import BITS, nbytes
from nanprobe.checkpoints.records import TensorEntry
from nanprobe.scan.look import boxes
from nanprobe.scan.rules.finding import counted, file_finding, tensor_finding
from nanprobe.scan.rules.values import share_of
from nanprobe.scan.subject import Looks, Subject, Tensor
from nanprobe.scan_records import ScanFinding

__all__ = ["judge_averages", "judge_declared_type", "judge_storages", "judge_ties"]

_INPUTS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight", "embed_in.weight",
           "tok_embeddings.weight", "tok_emb.weight", "token_embedding.weight")  # fmt: skip
_OUTPUTS = ("lm_head.weight", "embed_out.weight", "output.weight", "predictions.decoder.weight", "head.weight")
_ALWAYS_TIED = (
    ("shared.weight", "encoder.embed_tokens.weight"),
    ("shared.weight", "decoder.embed_tokens.weight"),
    ("shared.weight", "model.encoder.embed_tokens.weight"),
    ("shared.weight", "model.decoder.embed_tokens.weight"),
)
"""Encoder-decoder models keep one table under several names, whatever their configuration says."""

_EMA_PREFIX = re.compile(
    r"(^|[._])(ema|model_ema|ema_model|ema_state_dict|state_dict_ema|ema_params|averaged_model|swa_model|ema_weights)([._]|$)"
)
_WRAPPER = re.compile(r"^(module|model|state_dict|shadow|net|online_model)\.")

WASTE_FROM = 1 << 16
"""Bytes of a storage that no tensor uses, from which on they are worth a word."""


def judge_ties(subject: Subject, looks: Looks) -> Iterator[ScanFinding]:
    """Yield tied weights that both are in the checkpoint and differ."""
    weights = {tensor.name: tensor for tensor in subject.tensors if tensor.role.role == "weight"}
    pairs: list[tuple[Tensor, Tensor]] = []
    declared = [
        scalar for scalar in subject.scalars
        if scalar.role == "config" and scalar.path[-1] == "tie_word_embeddings" and scalar.value is True
    ]  # fmt: skip
    if declared:
        tables = _ending(weights, _INPUTS)
        heads = _ending(weights, _OUTPUTS)
        if len(tables) == 1 and len(heads) == 1:
            pairs.append((tables[0], heads[0]))
    for one, other in _ALWAYS_TIED:
        for name, tensor in weights.items():
            if name == one or name.endswith("." + one):
                twin = weights.get(name[: len(name) - len(one)] + other)
                if twin is not None:
                    pairs.append((tensor, twin))
    for first, second in pairs:
        yield from _tie(first, second, looks)


def _ending(weights: Mapping[str, Tensor], endings: Sequence[str]) -> list[Tensor]:
    return [
        tensor for name, tensor in weights.items() if any(name == end or name.endswith("." + end) for end in endings)
    ]


def _tie(first: Tensor, second: Tensor, looks: Looks) -> Iterator[ScanFinding]:
    one, other = first.entry, second.entry
    if one.pieces == other.pieces:
        return
    if one.shape != other.shape:
        message = f"it is tied to {first.name}, which has the shape {list(one.shape)}"
        yield tensor_finding(second, "tied-mismatch", "warning", message, counted(second, other=first.name))
        return
    if not looks.can(one) or not looks.can(other):
        return
    count, largest, at = differing(one, other, looks)
    if count:
        evidence = counted(second, count=count, absmax=largest, first_index=list(at or ()), other=first.name)
        message = f"it is tied to {first.name} and differs in {share_of(count, other.elements)}, by up to {largest:.4g}"
        yield tensor_finding(second, "tied-mismatch", "warning", message, evidence)


def differing(one: TensorEntry, other: TensorEntry, looks: Looks) -> tuple[int, float, tuple[int, ...] | None]:
    """Return how many elements differ (NaN equals NaN), the largest difference, and the first index."""
    count, largest = 0, 0.0
    at: tuple[int, ...] | None = None
    with np.errstate(all="ignore"):
        for start, size in boxes(one.shape):
            a, b = looks.read(one, (start, size)), looks.read(other, (start, size))
            mask = (a != b) & ~((a != a) & (b != b))
            found = int(np.count_nonzero(mask))
            if not found:
                continue
            if at is None:
                inside = np.unravel_index(int(mask.reshape(-1).argmax()), size) if size else ()
                at = tuple(int(x) + int(y) for x, y in zip(start, inside, strict=True))
            count += found
            gaps = np.abs(a[mask].astype(np.float64) - b[mask].astype(np.float64))
            finite = gaps[np.isfinite(gaps)]
            largest = max(largest, float(finite.max()) if finite.size else float("inf"))
    return count, largest, at


def judge_averages(subject: Subject) -> Iterator[ScanFinding]:
    """Yield averages (EMA) that do not fit the model beside them: shape, finiteness, zeros, missing parameters."""
    averages = [tensor for tensor in subject.tensors if tensor.role.role == "ema"]
    if not averages:
        return
    model = {_plain(tensor.name): tensor for tensor in subject.tensors if tensor.role.role in ("weight", "buffer")}
    matched: set[str] = set()
    for average in averages:
        name = average.entry.of or _plain(_EMA_PREFIX.sub(".", average.name).strip("."))
        own = model.get(name) or model.get(_plain(name))
        if own is None:
            continue
        matched.add(_plain(own.name))
        yield from _average(average, own)
    missing = [
        tensor for name, tensor in model.items() if name not in matched and tensor.role.role == "weight"
    ]  # fmt: skip
    if matched and missing and len(matched) >= len(missing):
        shown = ", ".join(tensor.name for tensor in missing[:3]) + (" ..." if len(missing) > 3 else "")
        message = f"{len(missing):,} of {len(missing) + len(matched):,} parameters have no average: {shown}"
        evidence = {"count": len(missing), "elements": len(missing) + len(matched)}
        yield file_finding(averages[0].entry.file, "ema-mismatch", "warning", message, evidence)


def _plain(name: str) -> str:
    """Return a name without the wrappers that training scripts put around a state dict."""
    while True:
        shorter = _WRAPPER.sub("", name)
        if shorter == name:
            return name
        name = shorter


def _average(average: Tensor, own: Tensor) -> Iterator[ScanFinding]:
    if average.entry.shape != own.entry.shape:
        shapes = f"{list(average.entry.shape)}, the model's tensor {list(own.entry.shape)}"
        evidence = counted(average, other=own.name)
        yield tensor_finding(average, "ema-mismatch", "warning", f"the average has the shape {shapes}", evidence)
        return
    mine, theirs = average.tally, own.tally
    if mine is None or theirs is None:
        return
    message: str | None = None
    severity = "warning"
    if mine.nonfinite and not theirs.nonfinite:
        message = "the average is not finite and the model is: an average that once saw a NaN keeps it for good"
    elif theirs.nonfinite and not mine.nonfinite:
        severity = "note"
        message = "the average is finite and the model is not: it may be the last good copy"
    elif mine.elements > 1 and mine.zero == mine.elements and theirs.zero < theirs.elements:
        message = "the average is zero throughout and the model is not: it was never updated"
    if message is not None:
        evidence = counted(average, count=mine.nonfinite or theirs.nonfinite or mine.zero, other=own.name)
        yield tensor_finding(average, "ema-mismatch", severity, message, evidence)


def judge_storages(subject: Subject) -> Iterator[ScanFinding]:
    """Yield storages of which the tensors use a small part only: a saved view drags its whole base along."""
    spans: dict[str, list[tuple[int, int]]] = {}
    owners: dict[str, Tensor] = {}
    for tensor in subject.tensors:
        entry = tensor.entry
        if entry.unreadable is not None or entry.dtype not in BITS:
            continue
        for piece in entry.pieces:
            if 0 in piece.shape:
                continue
            last = piece.offset + sum((n - 1) * step for n, step in zip(piece.shape, piece.strides, strict=True))
            begin = piece.offset * BITS[entry.dtype] // 8
            spans.setdefault(piece.storage, []).append((begin, nbytes(last + 1, entry.dtype)))
            owners.setdefault(piece.storage, tensor)
    for identity, found in spans.items():
        storage = subject.index.storages[identity]
        used, reached = 0, 0
        for begin, end in sorted(found):
            used += max(end - max(begin, reached), 0)
            reached = max(reached, end)
        wasted = storage.size - used
        if wasted >= WASTE_FROM and storage.size >= 2 * used:
            owner = owners[identity]
            message = f"its storage has {storage.size:,} bytes, of which tensors use {used:,}: a view was saved"
            evidence = counted(owner, bytes=storage.size, used=used, tensors=len(found))
            yield tensor_finding(owner, "storage-bloat", "warning", message, evidence)


def judge_declared_type(subject: Subject) -> Iterator[ScanFinding]:
    """Yield a configuration that names another type than most of the weights have."""
    declared = [
        scalar for scalar in subject.scalars
        if scalar.role == "config" and scalar.path in (("torch_dtype",), ("dtype",)) and isinstance(scalar.value, str)
    ]  # fmt: skip
    weights: Counter[str] = Counter()
    for tensor in subject.tensors:
        if tensor.role.role == "weight" and tensor.entry.dtype in ("float32", "float16", "bfloat16"):
            weights[tensor.entry.dtype] += tensor.entry.elements
    if not declared or not weights:
        return
    says = str(declared[0].value).removeprefix("torch.")
    stored, elements = weights.most_common(1)[0]
    if says in ("float32", "float16", "bfloat16") and says != stored:
        message = (
            f"the configuration says {says}, and {elements:,} of {weights.total():,} elements are stored as {stored}"
        )
        evidence = {"count": elements, "elements": weights.total(), "format": stored, "declared": says}
        yield file_finding(declared[0].file, "dtype-mismatch", "warning", message, evidence)
