"""A batch that is said to have failed in training and fails in no precision here: what is left to suspect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanprobe.formats import by_dtype
from nanprobe.records import Finding

__all__ = ["Original", "not_reproduced"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """What a bundle says of the training step that it was written in.

    ``reason`` is why it was written, ``amp`` holds mode, dtype and loss scale of then, ``history`` the last steps, each
    with ``loss`` and ``grad_norm``; ``random_restored`` says whether all random state of then could be put back.
    """

    reason: str | None = None
    step: int | None = None
    amp: Mapping[str, Any] = field(default_factory=dict)
    history: Any = None
    random_restored: bool = False

    @property
    def failure(self) -> str | None:
        """What failed, in words; None when the bundle does not say that anything did."""
        if self.reason:
            return self.reason
        last = self.history[-1] if isinstance(self.history, Sequence) and self.history else None
        if isinstance(last, Mapping):
            for name, value in last.items():
                if isinstance(value, float) and not math.isfinite(value):
                    return f"{name} was {value}"
        return None


def not_reproduced(original: Original | None, verdict: str, conditions: Mapping[str, Any]) -> Finding | None:
    """Return a warning when the bundle says that its step failed and the replay is clean, with what is to suspect.

    ``conditions`` are the report's, with ``precisions`` and ``device`` beside them; None when there is nothing to say.
    """
    if original is None or verdict != "clean" or original.failure is None:
        return None
    suspects = list(_suspects(original, conditions))
    step = f" of step {original.step:,}" if original.step is not None else ""
    return Finding(
        rule="not-reproduced",
        severity="warning",
        message=(
            f"the bundle{step} says that training failed ({original.failure}), and nothing fails in this replay. "
            f"Remaining suspects: {'; '.join(suspects)}"
        ),
        evidence={"reason": original.failure, "step": original.step, "suspects": suspects},
    )


def _suspects(original: Original, conditions: Mapping[str, Any]) -> Iterator[str]:
    """Yield what may differ from the step that failed, the most easily changed first."""
    amp = original.amp
    fmt = by_dtype(str(amp.get("dtype") or ""))
    then = fmt.name if fmt is not None else amp.get("dtype")
    replayed = conditions["precisions"]
    if then and then not in replayed:
        yield f"the precision (training ran in {then}, replayed here: {', '.join(replayed)})"
    if amp.get("mode") and amp["mode"] != conditions["mode"]:
        yield f"the mode (training used {amp['mode']}, this was {conditions['mode']})"
    scale = amp.get("loss_scale")
    if isinstance(scale, int | float) and scale not in conditions["loss_scales"].values():
        shown = ", ".join(f"{value:g}" for value in dict.fromkeys(conditions["loss_scales"].values()))
        yield f"the loss scale (training used {scale:g}, this was {shown})"
    if not conditions["train"]:
        yield "training mode (this was eval)"
    if not conditions["backward"]:
        yield "the loss and the backward pass (this was forward only)"
    yield "the weights (they must be those of before the step)"
    if not original.random_restored:
        yield "random numbers (the state of then could not be restored in full)"
    if conditions["compiled"]:
        yield "compiled kernels (compiled parts ran eagerly)"
    if conditions["device"] == "cpu":
        if conditions["attention"] == "fused":
            yield "the attention back end (try --attention math-half)"
        if conditions["reduced_precision_reduction"] is None:
            yield "sums in half (try --reduced-precision-reduction)"
        if conditions["tf32"] is None:
            yield "TF32 (try --tf32)"
        yield "a defect of one GPU's kernels, its order of summation or a race, which no replay on a CPU can show"
    else:
        yield "another GPU, driver or library version, a race, or memory that nothing wrote"
    yield "the optimizer step, and gradients that came from other processes"
