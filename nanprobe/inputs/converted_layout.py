"""Checkpoints whose layout differs from the model's modules because transformers converts between the two.

Since version 5 the library keeps, say, the experts of a mixture in one tensor and writes them to disk one by one. Its
own conversion is asked for, since it knows the layout of every family.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["in_model_layout"]


def in_model_layout(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the state dict under the model's own names and whether that took a conversion.

    Only models of transformers have one; for all others, and when the conversion does not work out, the state dict
    comes back as it is. A conversion holds the whole converted model in memory.
    """
    library: Any = sys.modules.get("transformers")
    base = getattr(library, "PreTrainedModel", None)
    if base is None or not isinstance(model, base) or not _has_conversions(model):
        return dict(state_dict), False
    logs = library.utils.logging
    verbosity, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity(logs.CRITICAL)
    logs.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            loader: Any = type(model)
            made, found = loader.from_pretrained(
                None,
                config=model.config,
                state_dict=dict(state_dict),
                dtype=next(model.parameters()).dtype,
                output_loading_info=True,
            )
    except Exception:
        # Whatever goes wrong in there, the plain comparison of names says more about the checkpoint.
        return dict(state_dict), False
    finally:
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()
    absent = set(found["missing_keys"])
    converted = {name: tensor for name, tensor in made.state_dict().items() if name not in absent}
    surplus = {name: state_dict[name] for name in found["unexpected_keys"] if name in state_dict}
    return {**converted, **surplus}, True


def _has_conversions(model: nn.Module) -> bool:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return False
    return bool(get_model_conversion_mapping(model))
