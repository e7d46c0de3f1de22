"""``sherlorch``: the operations of forward and loss as a graph, walked back from a bad loss or output."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.diagnosis.answers import NO_ANSWER, Answer
from benchmarks.diagnosis.case import Control, Fault
from benchmarks.diagnosis.peers.plain import Missing, low_precision
from benchmarks.diagnosis.peers.words import aten_names

__all__ = ["answer"]


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    return [part for part in parts if isinstance(part, Tensor)]


def answer(case: Fault | Control) -> Answer:
    """Trace forward and loss and ask for the culprit of the loss, else of the output."""
    try:
        import sherlorch
    except ImportError as error:
        raise Missing("sherlorch is not installed: pip install 'nanprobe[peers]'") from error
    with low_precision(case) as run:
        try:
            with sherlorch.trace() as tracker:
                tracker.watch(run.model)
                output = run.forward()
                loss = run.loss(output)
        except Exception as error:  # what the tracer or the model raises is its answer
            return Answer(found=False, note=f"{type(error).__name__}: {error}")
        for tensor in [*([loss] if loss is not None else []), *_tensors(output)]:
            if not tracker.has_issue(tensor):
                continue
            try:
                culprits = tracker.diagnose(tensor).culprits
            except KeyError:
                continue
            if culprits:
                first = min(culprits, key=lambda node: node.seq)
                path = first.module_path
                module = None if path is None else path.removeprefix("model").removeprefix(".")
                phase = "loss" if path is None else "forward"
                return Answer(found=True, phase=phase, module=module, ops=aten_names(first.op_name), errors=1)
    return NO_ANSWER
