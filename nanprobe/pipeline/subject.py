"""What is replayed, loaded: the model, the batch, the loss and the weights that a config names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from nanprobe.checkpoints import content_digest
from nanprobe.config import CheckpointSpec, Config, Settings
from nanprobe.diagnose.reproduction import Original
from nanprobe.errors import UsageError
from nanprobe.inputs.batch import load_batch
from nanprobe.inputs.bundle import Bundle
from nanprobe.inputs.device import check_device
from nanprobe.inputs.loss import build_loss
from nanprobe.inputs.model import build_model
from nanprobe.inputs.optimizer import build_optimizer, like_optimizer, optimizer_state
from nanprobe.inputs.rng import RandomState
from nanprobe.inputs.state_dict import read_state_dict
from nanprobe.inputs.weights import load_into
from nanprobe.lanes.lane_model import Weights
from nanprobe.lanes.spec import LossFunction
from nanprobe.lanes.step import StepSpec

__all__ = ["Subject", "load_subject", "step_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """What is replayed, loaded: the model, the batch as saved, the loss, and what the report says of them.

    ``call`` says how the batch becomes arguments. ``weights`` maps the checkpoint afresh; ``random`` is the random
    state of the original step and ``original`` what a bundle says of it; ``step`` is what is done with the gradients.
    ``timings`` are seconds spent already, by stage.
    """

    model: nn.Module
    batch: Any
    call: str = "auto"
    loss: LossFunction | None = None
    weights: Weights | None = None
    random: RandomState | None = None
    step: StepSpec | None = None
    original: Original | None = None
    described: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)


def load_subject(config: Config, *, trust_pickle: bool) -> Subject:
    """Load what ``config`` names; UsageError when something does not fit or there is no batch."""
    settings = config.settings
    device = check_device(settings.device)
    if config.batch is None:
        raise UsageError("there is no batch to replay")
    loaded = load_batch(config.batch, trust_pickle=trust_pickle, folder=config.folder)
    model = build_model(config.model, config.folder, settings.seed, with_weights=config.checkpoint is None)
    loss = build_loss(config.loss, config.folder) if config.loss is not None else None
    described: dict[str, Any] = {
        "config": str(config.source) if config.source is not None else None,
        "batch": {"path": config.batch.given, "digest": content_digest(config.batch.path)},
        "checkpoint": None,
    }
    notes = list(config.notes)
    weights: Weights | None = None
    spec = config.checkpoint
    if spec is not None:
        # Mapped again later, when the model's code may have gone to another folder.
        fixed = spec.path.absolute()

        def weights() -> Mapping[str, torch.Tensor]:
            return read_state_dict(fixed, key=spec.key, strip_prefix=spec.strip_prefix)

        result = load_into(
            model,
            read_state_dict(spec.path, key=spec.key, strip_prefix=spec.strip_prefix),
            strict=spec.strict,
        )
        notes.extend(result.notes)
        described["checkpoint"] = {"path": spec.given, "digest": content_digest(spec.path)}
        if result.missing or result.unexpected:
            described["checkpoint"]["missing"] = list(result.missing)
            described["checkpoint"]["unexpected"] = list(result.unexpected)
    if settings.device != "cpu":
        model.to(device)  # once, so that lanes share its memory there
    random, original = None, None
    bundle = loaded.bundle
    if bundle is not None:
        random = bundle.rng
        unavailable = random.not_restorable() if random is not None else None
        if unavailable is not None:
            notes.append(unavailable)
        original = Original(
            reason=bundle.reason,
            step=bundle.step,
            amp=bundle.amp,
            history=bundle.history,
            random_restored=random is not None and unavailable is None,
        )
    step, note = step_of(settings, model, folder=config.folder, bundle=loaded.bundle, checkpoint=spec)
    if note is not None:
        notes.append(note)
    return Subject(
        model=model,
        batch=loaded.value,
        call=config.batch.call,
        loss=loss,
        weights=weights,
        random=random,
        step=step,
        original=original,
        described=described,
        notes=tuple(notes),
    )


def step_of(
    settings: Settings,
    model: nn.Module,
    *,
    folder: Path | None = None,
    bundle: Bundle | None = None,
    checkpoint: CheckpointSpec | None = None,
    live: Optimizer | None = None,
) -> tuple[StepSpec | None, str | None]:
    """Return what is done with the gradients, None when nothing is asked for, and a note about the optimizer's state.

    ``live`` is an optimizer of the model's to step like. UsageError when the optimizer cannot be made.
    """
    if settings.optimizer is None and settings.clip_grad_norm is None:
        return None, None
    make, state, note = None, None, None
    if live is not None:
        make, state = like_optimizer(live, model)
    elif settings.optimizer is not None:
        make = build_optimizer(settings.optimizer, folder)
        state, note = optimizer_state(bundle.optimizer if bundle is not None else None, checkpoint, model, make)
    scaler = bundle.amp.get("scaler") if bundle is not None else None
    return (
        StepSpec(
            clip_grad_norm=settings.clip_grad_norm,
            make=make,
            state=state,
            scaler=scaler if isinstance(scaler, Mapping) else {},
        ),
        note,
    )
