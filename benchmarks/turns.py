"""What several benchmarks share: runs measured in turn, and one lane run by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nanprobe.lanes.body import LaneRun
from nanprobe.lanes.run import _put_back
from nanprobe.lanes.spec import ReplaySpec

__all__ = ["lane_alone", "medians", "spec_of", "timed"]

Loss = Callable[[Any, Any], torch.Tensor]


def spec_of(model: Any, batch: Any, loss: Loss, precision: str, **settings: Any) -> ReplaySpec:
    """Return what a replay of a model with keyword inputs is asked to do, forward and backward."""
    return ReplaySpec(
        model=model,
        batch=batch,
        bind=lambda _, value: ((), value),
        precisions=(precision,),
        loss=loss,
        train=True,
        backward=True,
        **settings,
    )


def lane_alone(spec: ReplaySpec, scale: float = 1.0, clock: Callable[[], float] = time.perf_counter) -> float:
    """Run the low lane by itself, unobserved, and return its seconds; making the lane is not counted."""
    (precision,) = spec.precisions
    with _put_back(spec):
        run = LaneRun(spec, precision, None, is_reference=False)
        with run._context():
            began = clock()
            loss = run._forward()
            assert loss is not None
            with run._observed_if_needed():
                (loss.float() * scale).backward()
            took = clock() - began
        run.lane.detach()
    return took


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Return ``run`` as one that returns the seconds it took."""

    def measured() -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return measured


def medians(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median of what each returns, taken in turn, after one round that is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            took = run()
            if number:
                seconds[name].append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}
