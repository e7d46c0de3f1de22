"""What to replay and how: the YAML config file, the flags that beat it, and the frozen :class:`Config` they become.

``specs`` holds the data types, each of which refuses values that make no sense; ``document`` reads YAML with line
numbers; ``loading`` turns a document into a :class:`Config`; ``overrides`` lets flags win; ``showing`` prints what was
resolved and where each value came from.
"""

from __future__ import annotations

from nanprobe.config.loading import find_config, load_config
from nanprobe.config.overrides import Overrides, apply_overrides
from nanprobe.config.showing import config_document, show_config
from nanprobe.config.specs import (
    BatchSpec,
    CheckpointSpec,
    Config,
    IgnoreRule,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
    Settings,
    Tolerance,
    TransformersSpec,
)

__all__ = [
    "BatchSpec",
    "CheckpointSpec",
    "Config",
    "IgnoreRule",
    "LossSpec",
    "ModelSpec",
    "OptimizerSpec",
    "Overrides",
    "Settings",
    "Tolerance",
    "TransformersSpec",
    "apply_overrides",
    "config_document",
    "find_config",
    "load_config",
    "show_config",
]
