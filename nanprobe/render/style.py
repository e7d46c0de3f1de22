"""Colour for terminals. It only repeats what words and markers already say, and is absent unless asked for."""

from __future__ import annotations

__all__ = ["Style"]

_CODES = {"bad": "1;31", "good": "1;32", "unsure": "1;33", "title": "1", "dim": "2"}


class Style:
    """Paints whole lines; with ``color=False`` it returns them untouched."""

    def __init__(self, *, color: bool) -> None:
        self._color = color

    def paint(self, tone: str, line: str) -> str:
        """Return ``line`` in a tone: "bad", "good", "unsure", "title" or "dim"; other tones leave it as it is."""
        code = _CODES.get(tone)
        return f"\x1b[{code}m{line}\x1b[0m" if self._color and code and line else line
