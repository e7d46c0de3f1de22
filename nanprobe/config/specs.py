"""The frozen data types of a config: what to load, and the settings of a replay.

:class:`Settings` is what the Python interface builds directly, so every type here checks itself and raises
:class:`~nanprobe.errors.UsageError` with the name of the field.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nanprobe.catalogue import MECHANISMS
from nanprobe.config import checks
from nanprobe.config.checks import Check, Unfit
from nanprobe.errors import UsageError
from nanprobe.formats import FORMATS

__all__ = [
    "FORMAT_NAMES",
    "SETTING_CHECKS",
    "BatchSpec",
    "CheckpointSpec",
    "Config",
    "IgnoreRule",
    "LossSpec",
    "ModelSpec",
    "OptimizerSpec",
    "Settings",
    "Tolerance",
    "TransformersSpec",
    "mechanism_pattern",
]

FORMAT_NAMES = tuple(fmt.name for fmt in FORMATS)


def mechanism_pattern(value: Any) -> str:
    """Check for the name of a mechanism, or a pattern (fnmatch) that fits at least one."""
    if isinstance(value, str) and fnmatch.filter(MECHANISMS, value):
        return value
    check = checks.one_of(*MECHANISMS)
    check(value)
    raise Unfit("the name of a mechanism", value)


def _validate(owner: object, rules: Mapping[str, Check]) -> None:
    """Replace every field of a frozen record by what its check returns; UsageError naming the field that is unfit."""
    for name, check in rules.items():
        try:
            value = check(getattr(owner, name))
        except Unfit as error:
            raise UsageError(f"{name.rstrip('_')}: {error}") from None
        object.__setattr__(owner, name, value)


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSpec:
    """A model of the transformers library: ``path`` is a folder or a ``config.json``, ``class_`` the class's name."""

    path: Path
    class_: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    given: str = ""

    def __post_init__(self) -> None:
        _validate(self, {"path": checks.path, "class_": checks.text, "kwargs": checks.keyword_arguments})
        object.__setattr__(self, "given", self.given or str(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """How to build the model: ``factory`` ("package.module:callable" or "file.py:callable"), or ``transformers``."""

    factory: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    transformers: TransformersSpec | None = None

    def __post_init__(self) -> None:
        _validate(self, {"factory": checks.optional(checks.text), "kwargs": checks.keyword_arguments})
        if (self.factory is None) == (self.transformers is None):
            raise UsageError("model: give either `factory` or `transformers`")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSpec:
    """Which weights: ``path`` to open and ``given`` as the user wrote it; ``key`` picks the state dict in the file.

    ``strip_prefix`` is taken off the front of every name that has it. Without ``strict`` missing and unexpected keys
    are reported and not refused.
    """

    path: Path
    key: str | None = None
    strip_prefix: str | None = None
    strict: bool = True
    given: str = ""

    def __post_init__(self) -> None:
        rules: dict[str, Check] = {
            "path": checks.path,
            "key": checks.optional(checks.text),
            "strip_prefix": checks.optional(checks.text),
            "strict": checks.boolean,
        }
        _validate(self, rules)
        object.__setattr__(self, "given", self.given or str(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Which batch: ``path`` to open and ``given`` as written; ``key`` is a dotted path to the batch in the file.

    ``call`` says how it becomes arguments ("auto", "kwargs", "args", "single"), ``dim`` where its batch dimension is.
    """

    path: Path
    key: str | None = None
    call: str = "auto"
    dim: int = 0
    given: str = ""

    def __post_init__(self) -> None:
        rules: dict[str, Check] = {
            "path": checks.path,
            "key": checks.optional(checks.text),
            "call": checks.one_of(*checks.CALLS),
            "dim": checks.any_int,
        }
        _validate(self, rules)
        object.__setattr__(self, "given", self.given or str(self.path))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """How to build the loss; what ``factory`` names is called as ``loss(output, batch)`` and returns a scalar."""

    factory: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _validate(self, {"factory": checks.text, "kwargs": checks.keyword_arguments})


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """The optimizer of the training run: ``name`` of a class in ``torch.optim`` and its keyword arguments."""

    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _validate(self, {"name": checks.text, "kwargs": checks.keyword_arguments})


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoreRule:
    """Findings known to be harmless: those whose module and mechanism fit these patterns (fnmatch), and why."""

    module: str = "*"
    mechanism: str = "*"
    why: str = ""

    def __post_init__(self) -> None:
        if self.module != "":
            _validate(self, {"module": checks.text})
        _validate(self, {"mechanism": mechanism_pattern})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The largest relative error that passes, in multiples of the unit roundoff of ``format``.

    ``module`` is a pattern (fnmatch) of module paths, None for every module.
    """

    module: str | None = None
    format: str
    multiple: float

    def __post_init__(self) -> None:
        rules = {"format": checks.one_of(*FORMAT_NAMES), "multiple": checks.positive_number}
        _validate(self, rules)


def _records(given: Any, name: str, kind: type[T]) -> tuple[T, ...]:
    """Return a list of records as a tuple; UsageError when it is none or holds something else."""
    if isinstance(given, (list, tuple)):
        other = next((item for item in given if not isinstance(item, kind)), None)
        if other is None:
            return tuple(given)
        given = other
    raise UsageError(f"{name}: expected a list of {kind.__name__}, got {checks.describe(given)}")


SETTING_CHECKS: Mapping[str, Check] = {
    "mode": checks.one_of(*checks.MODES),
    "autocast_policy": checks.one_of(*checks.AUTOCAST_POLICIES),
    "attention": checks.one_of(*checks.ATTENTIONS),
    "fp8_scaling": checks.one_of(*checks.FP8_SCALINGS),
    "tf32": checks.optional(checks.boolean),
    "reduced_precision_reduction": checks.optional(checks.boolean),
    "flush_subnormals": checks.boolean,
    "train": checks.optional(checks.boolean),
    "backward": checks.optional(checks.boolean),
    "loss_scale": checks.optional(checks.loss_scale),
    "keep_fp32": checks.texts,
    "clip_grad_norm": checks.optional(checks.positive_number),
    "seed": checks.seed,
    "device": checks.device,
    "batch_dim": checks.any_int,
}
"""The check of every setting that is a plain value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to replay; every field means what the config key of the same name means.

    None stands for "follows from the rest": ``train`` and ``backward`` from whether there is a loss, ``loss_scale``
    from precision and backward, ``tf32`` and ``reduced_precision_reduction`` from the device. ``batch_dim`` is the key
    ``batch: {dim: ...}``. UsageError when a value makes no sense.
    """

    mode: str = "autocast"
    autocast_policy: str = "cuda"
    attention: str = "fused"
    fp8_scaling: str = "tensor"
    tf32: bool | None = None
    reduced_precision_reduction: bool | None = None
    flush_subnormals: bool = False
    train: bool | None = None
    backward: bool | None = None
    loss_scale: float | None = None
    keep_fp32: tuple[str, ...] = ()
    clip_grad_norm: float | None = None
    optimizer: OptimizerSpec | None = None
    seed: int = 0
    ignore: tuple[IgnoreRule, ...] = ()
    tolerances: tuple[Tolerance, ...] = ()
    device: str = "cpu"
    batch_dim: int = 0

    def __post_init__(self) -> None:
        _validate(self, SETTING_CHECKS)
        object.__setattr__(self, "ignore", _records(self.ignore, "ignore", IgnoreRule))
        object.__setattr__(self, "tolerances", _records(self.tolerances, "tolerances", Tolerance))

    def resolved_train(self, *, loss_given: bool) -> bool:
        """Return whether the model is in training mode; by default so when a loss is given or backward is asked for."""
        return self.train if self.train is not None else loss_given or self.backward is True


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything a command needs: what to load, the settings, and where each value came from.

    ``source`` is the config file as it was named, ``folder`` the folder that relative paths and factories refer to.
    ``origins`` maps a top-level key to "nanprobe.yaml:3" or "--mode"; a key that is missing there has its default.
    ``notes`` are things the user should know, one sentence each.
    """

    source: Path | None
    folder: Path
    model: ModelSpec
    checkpoint: CheckpointSpec | None = None
    batch: BatchSpec | None = None
    loss: LossSpec | None = None
    settings: Settings = field(default_factory=Settings)
    origins: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
