"""Plain numbers in the object trees of a checkpoint: loss scale, learning rates, counters, bests of callbacks.

A bounded walk; lists of numbers that say nothing about the training (random states, parameter numbers) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from nanprobe.checkpoints.inert import Foreign
from nanprobe.checkpoints.parts import Part
from nanprobe.checkpoints.records import Scalar
from nanprobe.checkpoints.walk import children, join_name

__all__ = ["collect_scalars"]

_MAX_NODES = 400_000
_MAX_SCALARS = 50_000
_MAX_DEPTH = 24
_MAX_TEXT = 200

_LEFT_OUT = frozenset(
    {"params", "param_names", "param_shapes", "param_slice_mappings", "_metadata", "rng_state", "random_rng_state"}
)
"""Keys whose values are no state of the training, or too many to look at."""

_SCALER_FIELDS = frozenset(
    {
        *("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker", "growth_tracker"),
        *("hysteresis_tracker", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window"),
        *("min_scale", "cur_hysteresis", "delayed_shift", "consecutive_hysteresis", "dynamic", "unskipped"),
        *("loss_scale", "_loss_scale", "_scale"),
    }
)
_SCALES = frozenset({"scale", "cur_scale", "_scale", "loss_scale", "_loss_scale"})
_COUNTERS = frozenset(
    {"global_step", "global_steps", "iteration", "step", "steps", "num_updates", "n_averaged", "completed_steps"}
)


def collect_scalars(part: Part) -> None:
    """Add the plain values of every tree of ``part`` to its scalars."""
    for file, tree in part.trees.items():
        name = file.rsplit("/", 1)[-1].rsplit("\\", 1)[-1]
        gguf = any(known.path == file and known.kind == "gguf" for known in part.files)
        for path, value in _leaves(tree):
            role = "config" if gguf else _role(path, value, name)
            if role is None or len(part.scalars) >= _MAX_SCALARS + 200_000:
                continue
            owner = _owner(part, file, path) if role == "optimizer-step" else None
            part.scalars.append(Scalar(name=join_name(path), path=path, file=file, value=value, role=role, of=owner))


def _owner(part: Part, file: str, path: tuple[Any, ...]) -> str | None:
    """Return the parameter whose state the value is part of."""
    at = path.index("state") if "state" in path else len(path)
    if len(path) <= at + 1:
        return None
    key = path[at + 1]
    return part.ids.get((file, path[:at]), {}).get(key, key if isinstance(key, str) else None)


def _leaves(root: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the plain values of a tree with their paths, each container once."""
    seen: set[int] = set()
    stack: list[tuple[tuple[Any, ...], Any]] = [((), root)]
    nodes = found = 0
    while stack and nodes < _MAX_NODES and found < _MAX_SCALARS:
        path, node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        inner: list[tuple[tuple[Any, ...], Any]] = []
        for keys, child, _ in children(node):
            nodes += 1
            if nodes >= _MAX_NODES:
                break
            if keys and isinstance(keys[-1], str) and keys[-1] in _LEFT_OUT:
                continue
            place = path + keys
            if type(child) in (int, float, bool) or (type(child) is str and len(child) <= _MAX_TEXT):
                found += 1
                yield place, child
            elif isinstance(child, (dict, list, tuple, Foreign)) and len(place) < _MAX_DEPTH:
                inner.append((place, child))
        stack.extend(reversed(inner))


def _role(path: tuple[Any, ...], value: Any, file: str) -> str | None:
    """Return the role of a value by the keys that lead to it, None when no rule looks at it."""
    lower = [part.lower() if isinstance(part, str) else "" for part in path]
    last = lower[-1] if lower else ""
    if type(value) is int and abs(value) >= 1 << 63:
        return None
    if file.startswith(("rng_state", "random_states")) or any(
        "rng" in part.split("_") or part.startswith(("rng", "random")) for part in lower
    ):
        return None
    if file.startswith("training_args") or (lower and lower[0] in ("args", "ds_config")):
        return "training-args" if len(path) <= 4 else None
    if isinstance(value, str):
        return None
    if file.startswith("scaler") or any("scaler" in part for part in lower) or _is_scaler(lower):
        if last in _SCALES:
            return "loss-scale"
        return "scaler" if last in _SCALER_FIELDS else "other"
    if "param_groups" in lower or any(part.startswith("param_groups.") for part in lower):
        return "lr" if last == "lr" or last.endswith(".lr") else "param-group"
    if file.startswith("scheduler") or any("sched" in part for part in lower):
        return "scheduler"
    if any(part in ("base_lrs", "_last_lr", "last_epoch", "_step_count") for part in lower):
        return "scheduler"
    if last == "step" and "state" in lower:
        return "optimizer-step"
    if lower and lower[0].startswith(("callback", "loops")):
        return "callback"
    if last in _COUNTERS and len(path) <= 3:
        return "step"
    if last in ("epoch", "epochs"):
        return "epoch"
    if last in ("cur_scale", "loss_scale"):
        return "loss-scale"
    if type(value) is float and not math.isfinite(value):
        return "other"
    return "other" if type(value) is float and len(path) <= 6 else None


def _is_scaler(lower: list[str]) -> bool:
    return (
        len(lower) >= 2
        and lower[-1] in _SCALER_FIELDS
        and lower[-2] in ("amp", "mixedprecision", "scaler", "amp_state")
    )
