"""Run the sample runs as a user would, and compare what they print with what they printed before.

``python -m tests.samples [NAME ...]`` writes the expected output again; then read the diff. Each ``expected.txt`` holds
the command (the one that the run's config names), what it printed on a pipe of 100 columns, and its exit code.

Output is compared *scrubbed*, because the last digits of half-precision kernels differ between processors:

- white space and rules are collapsed, so that a number of another length moves nothing;
- a relative error becomes ``<err>``, and the place of a worst error ``<place>``;
- the rows of a table without a culprit, which are chosen by their errors, become ``<rows>``;
- versions and durations become ``<version>`` and ``<time>``;
- what is emulated, which depends on the processor, becomes ``<emulated>``;
- single gradients that cancel to zero are left out, and precisions that share a line get one each;
- of what remains, counts must be the same and measured values may differ by 2 %.

Everything else, every word and every name, must be as it was.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path

from nanprobe.cli import main as nanprobe_main

ROOT = Path(__file__).parent.parent
RUNS = sorted(path.parent.name for path in ROOT.glob("sample_runs/*/nanprobe.yaml"))

_COMMAND = re.compile(r"^#\s+(nanprobe .*--config .*)$", re.MULTILINE)
_ERROR = re.compile(r"\b\d\.\de-\d+\b|(?<=rel\. error )\d\S*")
_PLACE = re.compile(r"(rel\. error at most <err>, in )(the gradient at )?\S+?(?=;|$| fp16| bf16| Gradients)")
_ROWS = re.compile(r"(?:^|(?<=\n))( *module +type.*?)(?=\n\n)", re.DOTALL)
_GRADIENTS = re.compile(r"Gradients - .*?(?=Also found|What to look|Coverage)")
_FLUSHED = re.compile(r"; [\d,]+ of [\d,]+ parameters with elements flushed to zero \([^)]*\)")
_EMULATED = re.compile(r"(?:nothing emulated|emulated, not run natively: .*?)(?=; on )", re.DOTALL)
_VERSION = re.compile(r"\b\d+\.\d+\.\d+(?:\+\w+)?\b")
_TIME = re.compile(r"\b(?:[\d.]+ m?s|under 1 ms)(?=[,\n]|$)")
_RULE = re.compile(r"-{2,}")
_NUMBER = re.compile(r"(?<![\w.#])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?![\w.])")
_COUNTED = re.compile(r" (?:NaN|Inf|-Inf|of|elements?|visits?|gradients?|modules?|parameters?|operations?)\b")
_TOLERANCE = 0.02


def command_of(name: str) -> str:
    """Return the command that a run's config names in its comment, to be typed in the project's folder."""
    found = _COMMAND.search((ROOT / "sample_runs" / name / "nanprobe.yaml").read_text(encoding="utf-8"))
    assert found is not None, f"the config of {name} names no command"
    return found.group(1).strip()


def output_of(name: str) -> str:
    """Return the command, what it prints on stdout and its exit code."""
    command = command_of(name)
    printed = io.StringIO()
    before = Path.cwd(), os.environ.get("COLUMNS")
    os.chdir(ROOT)
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()) as errors:
            code = nanprobe_main(shlex.split(command)[1:])
    finally:
        os.chdir(before[0])
        if before[1] is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before[1]
    assert code in (0, 1), errors.getvalue()
    return f"$ {command}\n{printed.getvalue()}\nexit code {code}\n"


def expected_of(name: str) -> str:
    """Return what is kept as the run's expected output."""
    return (ROOT / "sample_runs" / name / "expected.txt").read_text(encoding="utf-8")


def scrubbed(text: str) -> str:
    """Return ``text`` without what differs from machine to machine."""
    if "\n>>" not in text:
        text = _ROWS.sub("<rows>", text)
    text = _ERROR.sub("<err>", text)
    text = _TIME.sub("<time>", _VERSION.sub("<version>", text))
    text = " ".join(_RULE.sub("", text).split())
    text = _EMULATED.sub("<emulated>", text)
    return _PLACE.sub(r"\1<place>", _GRADIENTS.sub(lambda found: _one_line_each(found.group()), text))


def _one_line_each(section: str) -> str:
    """Return the section on gradients with a line for each precision, without what was flushed to zero."""
    lines = []
    for line in _FLUSHED.sub("", section).split(" - ")[1:]:
        names, _, words = line.strip().partition(": ")
        lines += [f"- {name}: {words}" for name in re.split(", | and ", names)]
    return " ".join(["Gradients", *sorted(lines), ""])


def difference(actual: str, expected: str) -> str | None:
    """Return where two outputs differ after scrubbing, None when they do not."""
    left, right = scrubbed(actual), scrubbed(expected)
    words_left, words_right = _NUMBER.split(left), _NUMBER.split(right)
    if words_left != words_right:
        at = next(
            (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
        )
        return f"...{left[max(at - 60, 0) : at + 60]}...\nis not\n...{right[max(at - 60, 0) : at + 60]}..."
    for one, other in zip(_NUMBER.finditer(left), _NUMBER.finditer(right), strict=True):
        a, b = (float(found.group().replace(",", "")) for found in (one, other))
        allowed = 0.0 if _COUNTED.match(left[one.end() :]) else _TOLERANCE * abs(b)
        if abs(a - b) > allowed:
            return (
                f"{one.group()} is not {other.group()} in ...{right[max(other.start() - 60, 0) : other.end() + 60]}..."
            )
    return None


def main(names: list[str]) -> None:
    """Write the expected output of the named runs, or of all."""
    for name in names or RUNS:
        (ROOT / "sample_runs" / name / "expected.txt").write_text(output_of(name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
