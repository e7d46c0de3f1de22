"""PyTorch's ``detect_anomaly``: the first backward function that returns NaN; it knows no modules and no Inf."""

from __future__ import annotations

import re

import torch

from benchmarks.diagnosis.answers import NO_ANSWER, Answer
from benchmarks.diagnosis.case import Control, Fault
from benchmarks.diagnosis.peers.plain import low_precision
from benchmarks.diagnosis.peers.words import aten_names

__all__ = ["answer"]

_NAMED = re.compile(r"Function '(\w+?)Backward\d*' returned nan")


def answer(case: Fault | Control) -> Answer:
    """Run forward and backward in anomaly mode and read the name out of the error."""
    with low_precision(case) as run, torch.autograd.detect_anomaly(check_nan=True):
        try:
            run.backward(run.loss(run.forward()))
        except RuntimeError as error:
            named = _NAMED.search(str(error))
            if named is None:
                return Answer(found=False, note=str(error).split("\n")[0])
            return Answer(found=True, phase="backward", ops=aten_names(named.group(1)), errors=1, places=False)
    return NO_ANSWER
