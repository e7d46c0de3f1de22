"""The resolved config as YAML, each key with a comment that says where its value came from.

The text is itself a config file: put beside the original, it gives the same config. Paths are written absolute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from nanprobe.config.document import ConfigDumper
from nanprobe.config.specs import Config, Tolerance

__all__ = ["config_document", "show_config"]

_FOLLOWS = {
    "checkpoint": "default: the weights that the model is built with",
    "batch": "default: none",
    "loss": 'default: output.loss, output["loss"], or a scalar output',
    "backward": "default: true when there is a loss",
    "loss_scale": "default: for fp16 with backward 65536, halved until it fits; else 1",
    "clip_grad_norm": "default: none",
    "optimizer": "default: none",
}


def show_config(config: Config) -> str:
    """Return the resolved config as YAML text with the origin of each value, ending in a newline."""
    lines = [f"# {config.source}" if config.source is not None else "# no config file"]
    for key, value in _values(config).items():
        flow = None if isinstance(value, dict | list) else False
        text = yaml.dump(
            {key: value},
            Dumper=ConfigDumper,
            sort_keys=False,
            allow_unicode=True,
            width=10_000,
            default_flow_style=flow,
        )
        first, *rest = text.rstrip("\n").split("\n")
        lines += [f"{first}  # {_origin(config, key)}", *rest]
    return "\n".join(lines) + "\n"


def config_document(config: Config) -> dict[str, Any]:
    """Return the resolved config and the origin of each value as a document that JSON can hold."""
    values = _values(config)
    return {
        "source": None if config.source is None else str(config.source),
        "config": values,
        "origins": {key: _origin(config, key) for key in values},
    }


def _origin(config: Config, key: str) -> str:
    if key == "train" and config.settings.train is None:
        return "default: true when a loss or `backward: true` is given, else false"
    return config.origins.get(key) or _FOLLOWS.get(key, "default")


def _values(config: Config) -> dict[str, Any]:
    """Return every key of the config file with its resolved value, in the order of the documentation."""
    settings = config.settings
    model: dict[str, Any]
    if config.model.transformers is not None:
        spec = config.model.transformers
        model = {"transformers": {"path": str(spec.path.absolute()), "class": spec.class_, "kwargs": dict(spec.kwargs)}}
    else:
        model = {"factory": config.model.factory, "kwargs": dict(config.model.kwargs)}
    checkpoint = config.checkpoint
    batch = config.batch
    return {
        "model": model,
        "checkpoint": checkpoint
        and {
            "path": str(checkpoint.path.absolute()),
            "key": checkpoint.key,
            "strip_prefix": checkpoint.strip_prefix,
            "strict": checkpoint.strict,
        },
        "batch": batch and {"path": str(batch.path.absolute()), "key": batch.key, "call": batch.call, "dim": batch.dim},
        "loss": config.loss and {"factory": config.loss.factory, "kwargs": dict(config.loss.kwargs)},
        "mode": settings.mode,
        "autocast_policy": settings.autocast_policy,
        "attention": settings.attention,
        "fp8_scaling": settings.fp8_scaling,
        "tf32": settings.tf32,
        "reduced_precision_reduction": settings.reduced_precision_reduction,
        "flush_subnormals": settings.flush_subnormals,
        "train": settings.resolved_train(loss_given=config.loss is not None),
        "backward": settings.backward,
        "loss_scale": settings.loss_scale,
        "keep_fp32": list(settings.keep_fp32),
        "clip_grad_norm": settings.clip_grad_norm,
        "optimizer": settings.optimizer
        and {"name": settings.optimizer.name, "kwargs": dict(settings.optimizer.kwargs)},
        "seed": settings.seed,
        "ignore": [{"module": r.module, "mechanism": r.mechanism, "why": r.why} for r in settings.ignore],
        "tolerances": _tolerances(settings.tolerances),
        "device": settings.device,
    }


def _tolerances(tolerances: tuple[Tolerance, ...]) -> Mapping[str, Any]:
    """Return tolerances as the config file writes them."""
    shown: dict[str, Any] = {}
    for tolerance in tolerances:
        if tolerance.module is None:
            shown[tolerance.format] = tolerance.multiple
        else:
            shown.setdefault(tolerance.module, {})[tolerance.format] = tolerance.multiple
    return shown
