"""Rules about the values of weights and buffers: non-finite, unsafe to cast, zero, constant, far out.

Each rule is a function of a tensor's record; a second look is asked for only where the counts call for one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nanprobe.formats import by_name
from nanprobe.numerics.stored import Tally, is_floating
from nanprobe.scan.rules.finding import counted, tensor_finding
from nanprobe.scan.subject import Looks, Tensor
from nanprobe.scan_records import ScanFinding

__all__ = ["judge_values"]

_JUDGED = ("weight", "buffer", "ema")
"""Roles whose values a model computes with."""

FLUSHED_SHARE = {16: 0.01, 8: 0.1}
"""Share of the non-zero elements flushed to zero from which on it is a warning, by the bits of the format.

In fp16 weights with a deviation of 0.02 lose one in a million, but single elements of biases and norms may be that
small in healthy models. In e4m3, which is meant to be used with a scale, the same weights lose 4 per cent.
"""

SUBNORMAL_SHARE = 0.5
"""Share of the non-zero elements that are subnormal from which on a tensor counts as mostly subnormal."""

NEAR = 0.5
"""Share of a format's largest value from which on a tensor is near the limit: one doubling overflows."""

OUTLIER_RATIO = 100.0
"""Largest magnitude over the 99.9 per cent quantile: trained language models reach about 40, a flipped bit 1e4."""

OUTLIER_FROM = 256
"""Elements from which on a quantile of 99.9 per cent says something about the others."""

_CANDIDATE = 30.0
_SMALLEST_MATRIX = 4

_NORM = re.compile(
    r"(^|[._])(\w*norm\w*|ln\w*|bn\w*|gn\d*|gamma|beta|layer_?scale\w*|ls\d+)([._]|$)",
    re.IGNORECASE,
)
_BIAS = re.compile(r"(^|[._])(\w*bias\w*|b)$")
_BORN_ZERO = re.compile(
    r"lora_B|lora_embedding_B|lora_up|lora\.up|hada_w2_a|lokr_w2|zero_conv|zero_module|controlnet_\w*block"
    r"|controlnet_cond_embedding\.conv_out|input_hint_block|adaLN|ada_ln|norm\w*\.linear\.|final_layer\.linear"
    r"|cls_token|mask_token|pos_embed|position_embedding|gate\b|alpha|A_log"
)
"""Weights that are zero when training starts, by design."""

_EMBEDDING = re.compile(
    r"emb|wte|wpe|lm_head|embed_out|output_projection|proj_out|predictions\.decoder|^output\.weight",
    re.IGNORECASE,
)
"""Tables with a row for each token, and the projections that are tied to them."""

_SCALAR_WEIGHT = re.compile(r"(scale|weight|bias|gamma|beta|alpha|temperature)$")


def judge_values(tensor: Tensor, casts: Sequence[str], looks: Looks) -> Iterator[ScanFinding]:
    """Yield what is wrong with the values of one weight, buffer, average or quantisation scale."""
    tally = tensor.tally
    if tally is None or not tally.elements:
        return
    role = tensor.role.role
    if role in (*_JUDGED, "scale"):
        yield from _nonfinite(tensor, tally, looks)
    if role == "scale":
        yield from _zero_scale(tensor, tally, looks)
    if role not in _JUDGED or not tally.finite:
        return
    if is_floating(tensor.entry.dtype) or tensor.entry.layout == "blocks":
        yield from _casts(tensor, tally, casts, looks)
        yield from _subnormal(tensor, tally, looks)
    # Of a tensor with a shard missing nothing can be said that is about all its elements.
    if role in ("weight", "ema") and not legitimate_inf(tensor, tally) and not tensor.entry.missing:
        flat = list(_constant(tensor, tally))
        yield from flat
        if not flat:
            yield from _outlier(tensor, tally, looks)
            yield from _dead(tensor, tally, looks)


def legitimate_inf(tensor: Tensor, tally: Tally) -> bool:
    """Return whether the only non-finite values are -Inf that a mask holds on purpose.

    A mask is 0 and -Inf and nothing else; a buffer of no dimensions is a fill value.
    """
    if tally.nan or tally.posinf or not tally.neginf:
        return False
    if tensor.entry.shape == ():
        named = _SCALAR_WEIGHT.search(tensor.name) is not None
        return tensor.role.role == "buffer" or not (tensor.entry.parameter or named)
    only_zero = tally.zero == tally.finite
    return only_zero and (tally.zero > 0 or tensor.role.role == "buffer")


def nonfinite_evidence(tensor: Tensor, tally: Tally, looks: Looks) -> dict[str, Any]:
    """Return the counts of non-finite elements and the index of the first."""
    first = looks.first(tensor.entry, {"bad": lambda values: ~np.isfinite(values)}).get("bad")
    return counted(
        tensor,
        nan=tally.nan,
        posinf=tally.posinf,
        neginf=tally.neginf,
        count=tally.nonfinite,
        absmax=tally.absmax,
        first_index=None if first is None else list(first),
        blocks=tensor.bad_blocks or None,
    )


def kinds_of(tally: Tally) -> str:
    """Return how many NaN, Inf and -Inf there are, in words."""
    named = ((tally.nan, "NaN"), (tally.posinf, "Inf"), (tally.neginf, "-Inf"))
    return ", ".join(f"{number:,} {word}" for number, word in named if number)


def share_of(count: int, elements: int) -> str:
    """Return a count with its denominator."""
    if count == elements:
        return "the only element" if elements == 1 else f"all {elements:,} elements"
    return f"{count:,} of {elements:,} elements"


def _nonfinite(tensor: Tensor, tally: Tally, looks: Looks) -> Iterator[ScanFinding]:
    if not tally.nonfinite or legitimate_inf(tensor, tally):
        return
    evidence = nonfinite_evidence(tensor, tally, looks)
    what = {"buffer": "buffer", "ema": "average", "scale": "quantisation scale"}.get(tensor.role.role, "weight")
    at = f", first at {evidence['first_index']}" if "first_index" in evidence else ""
    blocks = f" in {tensor.bad_blocks:,} block{'' if tensor.bad_blocks == 1 else 's'}" if tensor.bad_blocks else ""
    message = f"this {what} holds {kinds_of(tally)}: {share_of(tally.nonfinite, tally.elements)}{blocks}{at}"
    yield tensor_finding(tensor, "nonfinite-weight", "error", message, evidence)


def _zero_scale(tensor: Tensor, tally: Tally, looks: Looks) -> Iterator[ScanFinding]:
    name = tensor.name.rpartition(".")[2]
    if not tally.zero or "zero" in name or not is_floating(tensor.entry.dtype):
        return
    first = looks.first(tensor.entry, {"zero": lambda values: values == 0}).get("zero")
    evidence = counted(tensor, count=tally.zero, first_index=None if first is None else list(first))
    message = f"quantisation scales are zero: {share_of(tally.zero, tally.elements)}; what they scale is lost"
    yield tensor_finding(
        tensor, "all-zero", "warning", message, evidence, "quantise again; a block of zeros wants a scale of one"
    )


def _casts(tensor: Tensor, tally: Tally, casts: Sequence[str], looks: Looks) -> Iterator[ScanFinding]:
    for name in casts:
        cast = by_name(name)
        over, under = tally.overflow.get(name, 0), tally.underflow.get(name, 0)
        if over:
            limit = cast.overflow_threshold
            first = looks.first(
                tensor.entry,
                {"bad": _reaches(limit)},
            ).get("bad")
            evidence = counted(
                tensor, format=name, count=over, absmax=tally.absmax, limit=cast.max,
                first_index=None if first is None else list(first),
            )  # fmt: skip
            message = (
                f"{share_of(over, tally.elements)} overflow in {name}: up to {tally.absmax:.5g}, limit {cast.max:.5g}"
            )
            yield tensor_finding(tensor, "cast-overflow", "warning", message, evidence)
        elif tally.absmax is not None and _near(tensor, tally.absmax, cast.max):
            evidence = counted(tensor, format=name, absmax=tally.absmax, limit=cast.max)
            message = (
                f"its largest magnitude, {tally.absmax:.5g}, is {tally.absmax / cast.max:.0%} of what {name} can hold"
            )
            yield tensor_finding(tensor, "near-limit", "warning", message, evidence)
        if under:
            nonzero = tally.finite - tally.zero
            severity = "warning" if under >= FLUSHED_SHARE.get(cast.bits, 0.01) * nonzero else "note"
            limit = cast.flush_threshold
            evidence = counted(tensor, format=name, count=under, absmax=tally.absmax, threshold=limit)
            if severity == "warning":
                first = looks.first(
                    tensor.entry,
                    {"bad": _flushed(limit)},
                ).get("bad")
                if first is not None:
                    evidence["first_index"] = list(first)
            message = f"{share_of(under, tally.elements)} become zero in {name}: at most {limit:.3g} in magnitude"
            yield tensor_finding(tensor, "cast-underflow", severity, message, evidence)


def _reaches(limit: float) -> Callable[[Any], Any]:
    """Return a predicate: finite and at least ``limit`` in magnitude."""
    return lambda values: (np.abs(values) >= limit) & np.isfinite(values)


def _flushed(limit: float) -> Callable[[Any], Any]:
    """Return a predicate: not zero and at most ``limit`` in magnitude."""
    return lambda values: (np.abs(values) <= limit) & (values != 0)


def _near(tensor: Tensor, absmax: float, limit: float) -> bool:
    """Return whether the largest value is close below the limit; a quantised tensor fills its format on purpose."""
    own = tensor.entry.dtype.startswith("float8") or tensor.entry.layout == "blocks"
    return not own and NEAR * limit <= absmax


def _subnormal(tensor: Tensor, tally: Tally, looks: Looks) -> Iterator[ScanFinding]:
    nonzero = tally.finite - tally.zero
    if not tally.subnormal or tally.subnormal < SUBNORMAL_SHARE * nonzero or tensor.entry.dtype.startswith("float8"):
        return
    evidence = counted(tensor, count=tally.subnormal, absmax=tally.absmax, zero=tally.zero)
    message = (
        f"{tally.subnormal:,} of {nonzero:,} non-zero elements are subnormal in {tensor.entry.dtype}, "
        f"at most {tally.absmax:.3g}: hardly numbers that training makes"
    )
    yield tensor_finding(tensor, "subnormal", "warning", message, evidence)


def _constant(tensor: Tensor, tally: Tally) -> Iterator[ScanFinding]:
    entry, name = tensor.entry, tensor.name
    matrix = sum(size > 1 for size in entry.shape) >= 2
    uniform = tally.zero == tally.elements or (tally.low is not None and tally.low == tally.high)
    if tally.nonfinite or not matrix or tally.elements < _SMALLEST_MATRIX or not uniform:
        return
    if _NORM.search(name) or _BIAS.search(name) or _BORN_ZERO.search(name):
        return
    evidence = counted(tensor, count=tally.elements, absmax=tally.absmax)
    if tally.zero == tally.elements:
        size = "a large tensor of zeros is more often a write that failed than a result of training"
        message = f"all {tally.elements:,} elements are zero" + (f"; {size}" if tally.elements >= 1 << 20 else "")
        yield tensor_finding(tensor, "all-zero", "warning", message, evidence)
    else:
        evidence["value"] = tally.low
        message = f"all {tally.elements:,} elements are {tally.low:.6g}"
        yield tensor_finding(tensor, "constant", "warning", message, evidence)


def _outlier(tensor: Tensor, tally: Tally, looks: Looks) -> Iterator[ScanFinding]:
    absmax, rms = tally.absmax, tally.rms
    if absmax is None or rms is None or not rms or tally.elements < OUTLIER_FROM:
        return
    # The quantile is read only where the 2-norm leaves room for such a ratio at all.
    if not math.isinf(rms) and absmax < min(_CANDIDATE, 0.3 * math.sqrt(tally.elements)) * rms:
        return
    if not looks.can(tensor.entry) or not is_floating(tensor.entry.dtype):
        return
    share = 0.999 if tally.elements >= 2000 else 1 - 2 / tally.elements
    bulk = looks.quantile(tensor.entry, share)
    if not bulk or not absmax >= OUTLIER_RATIO * bulk:
        return
    first = looks.first(tensor.entry, {"bad": lambda values: np.abs(values) == absmax}).get("bad")
    count = looks.count(tensor.entry, lambda values: (np.abs(values) >= OUTLIER_RATIO * bulk) & np.isfinite(values))
    evidence = counted(
        tensor, count=count, absmax=absmax, quantile=bulk, first_index=None if first is None else list(first)
    )
    at = f" at {list(first)}" if first is not None else ""
    message = f"{absmax:.4g}{at} is {absmax / bulk:,.0f} times what {share:.1%} of its elements stay below ({bulk:.3g})"
    yield tensor_finding(tensor, "outlier", "warning", message, evidence)


def _dead(tensor: Tensor, tally: Tally, looks: Looks) -> Iterator[ScanFinding]:
    entry, name = tensor.entry, tensor.name
    if sum(size > 1 for size in entry.shape) < 2 or entry.shape[0] < 2 or tally.zero == tally.elements:
        return
    rows, width = entry.shape[0], math.prod(entry.shape[1:])
    # In types of 8 bits and less zeros are too common to look for rows of them in every tensor.
    wide = entry.dtype in ("float16", "bfloat16", "float32", "float64")
    if not wide or tally.zero < min(rows, width) or _BIAS.search(name) or _BORN_ZERO.search(name):
        return
    if not looks.can(entry):
        return
    dead_rows, dead_columns = looks.dead(entry)
    if _EMBEDDING.search(name):
        dead_rows = _without_padding(dead_rows, rows)
    if not dead_rows and not dead_columns:
        return
    parts = []
    if dead_rows:
        parts.append(f"{len(dead_rows):,} of {rows:,} rows")
    if dead_columns:
        parts.append(f"{len(dead_columns):,} of {width:,} columns")
    evidence = counted(
        tensor, count=len(dead_rows) + len(dead_columns), rows=len(dead_rows), columns=len(dead_columns),
        first_index=_first_dead(entry.shape, dead_rows, dead_columns),
    )  # fmt: skip
    message = f"{' and '.join(parts)} are zero throughout"
    yield tensor_finding(tensor, "dead-rows", "warning", message, evidence)


def _without_padding(dead: list[int], rows: int) -> list[int]:
    """Return the dead rows of an embedding but those for padding: the tail of the vocabulary, and single rows."""
    left = set(dead)
    at = rows - 1
    while at in left:
        left.discard(at)
        at -= 1
    return sorted(left) if len(left) > 2 else []


def _first_dead(shape: tuple[int, ...], rows: list[int], columns: list[int]) -> list[int]:
    if rows:
        return [rows[0], *(0,) * (len(shape) - 1)]
    return [0, *(int(part) for part in np.unravel_index(columns[0], shape[1:]))]
