"""Looking for memory that was read and never written: a lane is run with new memory filled, with NaN and with zeros."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from nanprobe.diagnose.lane import LaneDiagnosis
from nanprobe.diagnose.memory import may_be_unwritten, unwritten_finding, with_unwritten
from nanprobe.lanes.run import run_with_memory
from nanprobe.lanes.spec import ReplaySpec
from nanprobe.lanes.trace import Trace
from nanprobe.records import Finding

__all__ = ["to_unwritten_memory"]


def to_unwritten_memory(
    spec: ReplaySpec, trace: Trace, diagnoses: Mapping[str, LaneDiagnosis]
) -> tuple[dict[str, LaneDiagnosis], tuple[Finding, ...]]:
    """Return the diagnoses with unwritten memory named where it is to blame, and a warning where it did no harm.

    Only a model that allocates memory and does not write it at once is run again. What is bad with zeros in that memory
    as well has another reason, and keeps it.
    """
    found = dict(diagnoses)
    if not trace.reference.unwritten:
        return found, ()
    filled = run_with_memory(spec, spec.reference, math.nan)
    if filled is None or filled.reader is None:
        return found, ()
    zeros = run_with_memory(spec, spec.reference, 0.0)
    if zeros is None or zeros.bad:
        return found, ()
    fact, named = filled.reader, False
    for name, diagnosis in diagnoses.items():
        if not may_be_unwritten(diagnosis):
            continue
        if name != spec.reference:
            zeros = run_with_memory(replace(spec, precisions=(name,)), name, 0.0)
        if zeros is not None and not zeros.bad:
            lane = trace.reference if name == spec.reference else trace.lanes[name]
            found[name] = with_unwritten(lane, diagnosis, fact)
            named = named or (name != spec.reference and found[name] is not diagnosis)
    return found, () if named else (unwritten_finding(fact),)
