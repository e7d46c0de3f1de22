"""What other tools name on the same cases, each run as its documentation says."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.diagnosis.answers import Answer
from benchmarks.diagnosis.case import Control, Fault
from benchmarks.diagnosis.peers import anomaly, msprobe, overflow_tracer, sherlorch

__all__ = ["PEERS"]

PEERS: dict[str, Callable[[Fault | Control], Answer]] = {
    "DebugUnderflowOverflow": overflow_tracer.answer,
    "sherlorch": sherlorch.answer,
    "detect_anomaly": anomaly.answer,
    "msprobe": msprobe.answer,
}
"""The peers by their names in the table; msprobe runs last, because it wraps PyTorch's functions for good."""
