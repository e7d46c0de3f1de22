"""transformers' ``DebugUnderflowOverflow``: stops after the first module that holds NaN or Inf; knows no operations."""

from __future__ import annotations

import contextlib
import io

from benchmarks.diagnosis.answers import NO_ANSWER, Answer
from benchmarks.diagnosis.case import Control, Fault
from benchmarks.diagnosis.peers.plain import Missing, low_precision

__all__ = ["answer"]


def answer(case: Fault | Control) -> Answer:
    """Run forward under the tracer and read the module of the last frame that it prints."""
    try:
        from transformers.debug_utils import DebugUnderflowOverflow
    except ImportError as error:
        raise Missing("transformers is not installed: pip install 'nanprobe[peers]'") from error
    printed = io.StringIO()
    with low_precision(case) as run, contextlib.redirect_stdout(printed):
        DebugUnderflowOverflow(run.model)
        try:
            run.forward()
        except ValueError as error:
            if "inf/nan detected" not in str(error):
                return Answer(found=False, note=str(error))
            return Answer(found=True, phase="forward", module=_last_module(printed.getvalue()), errors=1)
        except Exception as error:  # what the tracer or the model raises otherwise is its answer too
            return Answer(found=False, note=f"{type(error).__name__}: {error}")
    return NO_ANSWER


def _last_module(text: str) -> str:
    """Return the path in the header of the last frame: 17 blanks, the path, a blank, the class."""
    headers = [line for line in text.splitlines() if line.startswith(" " * 17) and "***" not in line]
    words = headers[-1].split() if headers else []
    return words[0] if len(words) > 1 else ""
