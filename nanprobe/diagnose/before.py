"""Faults that are there before anything runs: in the batch, in the parameters and buffers, and in their cast."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nanprobe.formats import by_name
from nanprobe.lanes.stored import StoredTensor
from nanprobe.records import FirstBad, Remedy

__all__ = ["StoredFault", "stored_faults"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFault:
    """One stored tensor that is at fault; ``precision`` is None when every precision has it."""

    tensor: StoredTensor
    precision: str | None
    mechanism: str
    count: int
    index: tuple[int, ...] | None
    message: str

    def first_bad(self, precision: str) -> FirstBad:
        """Return the fault as the origin of one precision's bad values."""
        tensor = self.tensor
        fix = Remedy(kind="fix-data", text=f"Repair or drop the bad elements of {tensor.name}.")
        if self.precision is not None:
            fix = Remedy(kind="keep-fp32", modules=(tensor.owner,) if tensor.owner else (), text="Keep it in FP32.")
        elif tensor.kind != "input":
            fix = Remedy(kind="fix-checkpoint", text="Go back to a checkpoint from before this value went bad.")
        return FirstBad(
            precision=precision,
            phase=tensor.kind,
            module=tensor.owner,
            visit=None,
            class_=tensor.class_,
            mechanism=self.mechanism,
            precision_related=self.precision is not None,
            count=self.count,
            elements=tensor.stats.elements,
            index=self.index,
            samples=tensor.detail.samples if tensor.detail is not None else None,
            reference_absmax=tensor.stats.absmax if self.precision is not None else None,
            limit=by_name(self.precision).max if self.precision is not None else None,
            parameter=tensor.name,
            explanation=f"{self.message[0].upper()}{self.message[1:]}.",
            remedies=(fix,),
        )


def stored_faults(tensors: Iterable[StoredTensor]) -> tuple[StoredFault, ...]:
    """Return the faults of stored tensors in the order given: non-finite values, overflow and rounding by a cast.

    A buffer or a batch field whose finite values are all zero is an additive mask, and its -Inf no fault; nor is the
    -Inf of a buffer without dimensions.
    """
    faults: list[StoredFault] = []
    for tensor in tensors:
        stats = tensor.stats
        masked = (tensor.only_mask and tensor.kind != "parameter") or (tensor.kind == "buffer" and stats.shape == ())
        bad = stats.nan + stats.posinf + (0 if masked else stats.neginf)
        if bad:
            counts = ((stats.nan, "NaN"), (stats.posinf, "Inf"), (stats.neginf, "-Inf"))
            kinds = [f"{number:,} {word}" for number, word in counts if number]
            faults.append(
                StoredFault(
                    tensor=tensor,
                    precision=None,
                    mechanism=f"nonfinite-{tensor.kind}",
                    count=bad,
                    index=tensor.detail.index if tensor.detail is not None else None,
                    message=f"{_noun(tensor)} already holds {' and '.join(kinds)} of {stats.elements:,} elements",
                )
            )
        for name, (count, index) in tensor.over.items():
            faults.append(
                StoredFault(
                    tensor=tensor,
                    precision=name,
                    mechanism="overflow",
                    count=count,
                    index=index,
                    message=(
                        f"casting {_noun(tensor)} to {name} turns {count:,} of {stats.elements:,} elements into Inf: "
                        f"it reaches {stats.absmax:.4g}, {name} ends at {by_name(name).max:.5g}"
                    ),
                )
            )
        for name, (count, index) in tensor.rounded.items():
            faults.append(
                StoredFault(
                    tensor=tensor,
                    precision=name,
                    mechanism="unrepresentable-constant",
                    count=count,
                    index=index,
                    message=(
                        f"{_noun(tensor)} holds integers stored as floats; casting to {name} changes {count:,} of "
                        f"{stats.elements:,} ({name} is exact up to {by_name(name).integer_limit:,})"
                    ),
                )
            )
    return tuple(faults)


def _noun(tensor: StoredTensor) -> str:
    return (
        f"batch field {tensor.name or '(the tensor itself)'}"
        if tensor.kind == "input"
        else f"{tensor.kind} {tensor.name}"
    )
