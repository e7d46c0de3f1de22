"""Cases that nanprobe does not answer rightly, what it gets wrong in each, and why."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KNOWN", "Known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The questions that are answered wrongly, and the reason."""

    wrong: tuple[str, ...]
    why: str


_CONSTANT = "which constant an operand was rounded from is not followed through the operations before"
_CANCELLED = Known(
    wrong=("mechanism",),
    why="that the operand of the root is a difference of nearly equal rounded values is not looked at",
)

KNOWN: dict[str, Known] = {
    **dict.fromkeys(
        (
            "focal_loss_with_a_clamp-fp16-autocast",
            "focal_loss_with_a_clamp-fp16-cast",
            "focal_loss_with_a_clamp-bf16-cast",
        ),
        Known(wrong=("mechanism",), why=_CONSTANT),
    ),
    **dict.fromkeys(
        ("lowest_value_of_fp32_converted-fp16-cast", "lowest_value_of_fp32_converted-bf16-cast"),
        Known(wrong=("mechanism",), why=_CONSTANT),
    ),
    "diffusion_timestep-bf16-cast": Known(wrong=("op",), why=_CONSTANT),
    **dict.fromkeys(
        (
            "variance_as_a_difference-fp16-cast",
            "variance_as_a_difference-bf16-cast",
            "distance_by_the_binomial_formula-fp16-cast",
        ),
        _CANCELLED,
    ),
}
"""The name of a case to what is wrong; a test fails when an entry is no longer true."""
