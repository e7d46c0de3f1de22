"""A bundle: a batch together with the random state, the mixed-precision state and the history of its training step.

A mapping with ``nanprobe_bundle: 1``. Everything but the batch may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanprobe.errors import UsageError
from nanprobe.inputs.rng import RandomState

__all__ = ["BUNDLE_VERSION", "Bundle", "is_bundle", "open_bundle"]

BUNDLE_VERSION = 1
_MARK = "nanprobe_bundle"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bundle:
    """What a bundle says besides the batch.

    ``rng`` is the random state of before the step; ``amp`` holds mode, dtype, loss_scale and the scaler's state;
    ``optimizer`` is the optimizer's state of before the step, as ``state_dict()`` has it; ``history`` is the loss,
    gradient norm, learning rate and loss scale of the last steps; ``reason`` says why the bundle was written.
    """

    rng: RandomState | None = None
    amp: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    step: int | None = None
    history: Any = None
    reason: str | None = None


def is_bundle(value: Any) -> bool:
    """Tell whether a loaded value is a bundle."""
    return isinstance(value, Mapping) and _MARK in value


def open_bundle(value: Mapping[str, Any], path: Path) -> tuple[Bundle, Any]:
    """Return a bundle's state and its batch; UsageError naming the file when the bundle is not as it should be."""
    version = value[_MARK]
    if type(version) is not int or version != BUNDLE_VERSION:
        plain = isinstance(version, str | float) or (isinstance(version, int) and version.bit_length() < 64)
        shown = str(version)[:40] if plain else f"(a {type(version).__name__})"
        raise UsageError(f"batch: {path} is a bundle of version {shown}, this nanprobe reads version {BUNDLE_VERSION}")
    if "batch" not in value:
        raise UsageError(f"batch: {path} is a bundle without a `batch`")
    for key in ("rng", "amp", "optimizer"):
        if value.get(key) is not None and not isinstance(value[key], Mapping):
            raise UsageError(f"batch: {path}: the bundle's `{key}` is a {type(value[key]).__name__}, not a mapping")
    rng = value.get("rng")
    try:
        state = RandomState.from_bundle(rng) if rng is not None else None
    except UsageError as error:
        raise UsageError(f"batch: {path}: {error}") from None
    step = value.get("step")
    reason = value.get("reason")
    return (
        Bundle(
            rng=state,
            amp=dict(value.get("amp") or {}),
            optimizer=value.get("optimizer"),
            step=int(step) if isinstance(step, int) else None,
            history=value.get("history"),
            reason=str(reason) if reason is not None else None,
        ),
        value["batch"],
    )
