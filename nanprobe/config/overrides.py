"""Flags beat the config file: a config with some values replaced, each remembered as coming from its flag."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanprobe.config.checks import Unfit
from nanprobe.config.specs import SETTING_CHECKS, BatchSpec, CheckpointSpec, Config
from nanprobe.errors import UsageError

__all__ = ["Overrides", "apply_overrides"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """The values of the flags; None where a flag was not given. Paths are relative to the current folder."""

    checkpoint: str | None = None
    batch: str | None = None
    mode: str | None = None
    autocast_policy: str | None = None
    attention: str | None = None
    fp8_scaling: str | None = None
    tf32: bool | None = None
    reduced_precision_reduction: bool | None = None
    flush_subnormals: bool | None = None
    backward: bool | None = None
    loss_scale: float | None = None
    device: str | None = None
    seed: int | None = None


def apply_overrides(config: Config, overrides: Overrides) -> Config:
    """Return the config with the flags' values in place; UsageError naming the flag when a value makes no sense.

    ``--checkpoint`` and ``--batch`` replace the path alone: key, prefix, call and batch dimension of the config stay.
    """
    origins = dict(config.origins)
    settings: dict[str, Any] = {}
    for field in dataclasses.fields(overrides):
        value = getattr(overrides, field.name)
        if value is None:
            continue
        flag = "--" + field.name.replace("_", "-")
        if value is False:
            flag = "--no-" + field.name.replace("_", "-")
        origins[field.name] = flag
        if field.name in SETTING_CHECKS:
            try:
                settings[field.name] = SETTING_CHECKS[field.name](value)
            except Unfit as error:
                raise UsageError(f"{flag}: {error}") from None
        elif not value:
            raise UsageError(f"{flag}: expected a path, got nothing")
    checkpoint, batch = config.checkpoint, config.batch
    if overrides.checkpoint is not None:
        path, given = Path(overrides.checkpoint), overrides.checkpoint
        checkpoint = (
            dataclasses.replace(checkpoint, path=path, given=given)
            if checkpoint is not None
            else CheckpointSpec(path=path, given=given)
        )
    if overrides.batch is not None:
        path, given = Path(overrides.batch), overrides.batch
        batch = (
            dataclasses.replace(batch, path=path, given=given)
            if batch is not None
            else BatchSpec(path=path, given=given)
        )
    return dataclasses.replace(
        config,
        checkpoint=checkpoint,
        batch=batch,
        settings=dataclasses.replace(config.settings, **settings),
        origins=origins,
    )
