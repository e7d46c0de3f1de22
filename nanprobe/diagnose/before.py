"""Faults that are there before anything runs: in the batch, in the parameters and buffers, and in their cast."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nanprobe.diagnose.explain import shown
from nanprobe.formats import by_name
from nanprobe.lanes.stored import StoredTensor
from nanprobe.records import Divergence, FirstBad, Remedy

__all__ = ["StoredFault", "stored_faults"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFault:
    """One stored tensor that is at fault; ``precision`` is None when every precision has it."""

    tensor: StoredTensor
    precision: str | None
    mechanism: str
    count: int
    index: tuple[int, ...] | None
    samples: tuple[int, ...] | None
    message: str

    @property
    def is_bad(self) -> bool:
        """Whether it holds NaN or Inf, and not only rounded values."""
        return self.mechanism != "unrepresentable-constant"

    def explains(self, origin: FirstBad, *, given_inf: bool = False) -> bool:
        """Whether an origin is where this fault was first used: nothing of its own went wrong there.

        A batch field is used by whatever takes the model's arguments and by the loss; ``given_inf`` says that the
        origin failed on -Inf from there. A parameter or buffer is used by its owner, or by the own code of a module
        around the owner.
        """
        if not self.is_bad:
            return False
        if self.tensor.kind == "input":
            return origin.phase in ("input", "loss") or (given_inf and self.tensor.stats.neginf > 0)
        if origin.module is None or origin.phase not in ("forward", "backward"):
            return False
        inside = origin.module == "" or any(
            owner == origin.module or owner.startswith(f"{origin.module}.") for owner in self.tensor.owners
        )
        return inside and (origin.module in self.tensor.owners or origin.between is not None)

    def first_bad(self, precision: str) -> FirstBad:
        """Return the fault as the origin of one precision's bad values."""
        tensor = self.tensor
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
            samples=self.samples,
            reference_absmax=tensor.stats.absmax if self.precision is not None else None,
            limit=by_name(self.precision).max if self.precision is not None else None,
            parameter=tensor.name,
            explanation=self._explanation(),
            remedies=(self._remedy(),),
        )

    def divergence(self, precision: str) -> Divergence:
        """Return the fault, rounded values, as the place where one precision leaves the reference."""
        return Divergence(
            precision=precision,
            phase=self.tensor.kind,
            module=self.tensor.owner,
            visit=None,
            class_=self.tensor.class_,
            mechanism=self.mechanism,
            parameter=self.tensor.name,
            explanation=self._explanation(),
        )

    def _explanation(self) -> str:
        text = f"{self.message[0].upper()}{self.message[1:]}."
        absmax = self.tensor.stats.absmax
        if self.precision is None and absmax is not None:
            text += f" Its finite values reach {shown(absmax)}."
        return text

    def _remedy(self) -> Remedy:
        tensor = self.tensor
        if self.precision is not None and tensor.kind == "input":
            return Remedy(kind="rewrite", text=f"Scale {tensor.name} down, or give it to the model as integers.")
        if self.precision is not None:
            return Remedy(kind="keep-fp32", modules=(tensor.owner,) if tensor.owner else (), text="Keep it in FP32.")
        if tensor.kind == "input":
            return Remedy(kind="fix-data", text=f"Repair or drop the bad elements of {tensor.name}.")
        return Remedy(kind="fix-checkpoint", text="Go back to a checkpoint from before this value went bad.")


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
                    samples=tensor.detail.samples if tensor.detail is not None else None,
                    message=f"{_noun(tensor)} already holds {' and '.join(kinds)} of {stats.elements:,} elements",
                )
            )
        for name, changed in tensor.over.items():
            faults.append(
                StoredFault(
                    tensor=tensor,
                    precision=name,
                    mechanism="overflow",
                    count=changed.count,
                    index=changed.index,
                    samples=changed.samples,
                    message=(
                        f"casting {_noun(tensor)} to {name} turns {changed.count:,} of {stats.elements:,} elements "
                        f"into Inf: it reaches {shown(stats.absmax or 0.0)}, {name} ends at {shown(by_name(name).max)}"
                    ),
                )
            )
        for name, changed in tensor.rounded.items():
            faults.append(
                StoredFault(
                    tensor=tensor,
                    precision=name,
                    mechanism="unrepresentable-constant",
                    count=changed.count,
                    index=changed.index,
                    samples=changed.samples,
                    message=(
                        f"{_noun(tensor)} holds integers stored as floats; casting to {name} changes "
                        f"{changed.count:,} of {stats.elements:,} ({name} is exact up to "
                        f"{by_name(name).integer_limit:,})"
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
