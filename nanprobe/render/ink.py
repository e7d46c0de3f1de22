"""How a piece of text from outside is written into one format's prose.

Sentences are composed once and read the same in every format; an ink decides how a name or an exception's text stands
in them, so that no format can forget to make it safe.
"""

from __future__ import annotations

import re

from nanprobe.render.names import neutral, one_line

__all__ = ["Ink", "MarkdownInk"]

_MARKDOWN_SPECIAL = re.compile(r"[\\`*_\[\]<>|&@#~]")
_ENTITIES = {"@": "&#64;"}
"""An escaped @ would still notify somebody on GitHub."""
_TICKS = re.compile(r"`+")


class Ink:
    """Plain text for terminals: names and prose are neutralised and otherwise left as they are."""

    def name(self, text: str) -> str:
        """Return a name from a model or a file (a module path, a batch field, a parameter)."""
        return neutral(text)

    def prose(self, text: str) -> str:
        """Return free text (an explanation, an exception) on one line."""
        return one_line(text)

    def command(self, text: str) -> str:
        """Return a command to type, or a line of configuration."""
        return f"`{neutral(text)}`"


class MarkdownInk(Ink):
    """GitHub-flavoured Markdown: names are code spans, prose is escaped, so neither HTML nor a mention gets through."""

    def name(self, text: str) -> str:
        """Return a name as a code span; a fence longer than any run of backticks in it keeps it closed."""
        safe = neutral(text)
        longest = max((len(ticks) for ticks in _TICKS.findall(safe)), default=0)
        fence = "`" * (longest + 1)
        pad = " " if safe.startswith("`") or safe.endswith("`") or not safe.strip() else ""
        return f"{fence}{pad}{safe}{pad}{fence}"

    def prose(self, text: str) -> str:
        """Return free text with every character that means something to Markdown escaped."""
        return _MARKDOWN_SPECIAL.sub(lambda found: _ENTITIES.get(found.group(), "\\" + found.group()), one_line(text))

    def command(self, text: str) -> str:
        """Return a command as a code span."""
        return self.name(text)
