"""Cases that nanprobe does not answer rightly, what it gets wrong in each, and why."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KNOWN", "Known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The questions that are answered wrongly, and the reason."""

    wrong: tuple[str, ...]
    why: str


KNOWN: dict[str, Known] = {
    "diffusion_timestep-bf16-cast": Known(
        wrong=("op",),
        why="the product after the cast rounds as much as the cast does, and the last of the two is named",
    ),
}
"""The name of a case to what is wrong; a test fails when an entry is no longer true."""
