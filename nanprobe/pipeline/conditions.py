"""What a report says of how a replay was run: environment and conditions."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nanprobe.config import Settings
from nanprobe.lanes.lane_model import kept_paths
from nanprobe.lanes.process_state import read_flags
from nanprobe.lanes.run import has_compiled_parts
from nanprobe.lanes.spec import ReplaySpec
from nanprobe.lanes.trace import Trace
from nanprobe.numerics.autocast_policy import unknown_to_us

__all__ = ["conditions", "environment"]

_WITH_FUSED_PATHS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)

_KEPT_BY_TRANSFORMERS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
"""Class attributes by which models of transformers name modules that a half-precision load leaves in FP32."""

_ATTENTION = {
    "math": "scaled-dot-product attention took PyTorch's math back end in every lane",
    "math-half": (
        "scaled-dot-product attention was written out, its scores kept in each lane's own precision and scaled after "
        "the product, as hand-written code has it"
    ),
}
"""What a report says about attention that is not left to PyTorch's choice."""


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions, the device and the flags that change numbers."""
    flags = read_flags()
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.machine(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
    found.update({name: value for name, value in flags.items() if name != "default_dtype"})
    found["default_dtype"] = str(torch.get_default_dtype()).removeprefix("torch.")
    found["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return found


def _limits(spec: ReplaySpec, emulated: Mapping[str, Any]) -> list[str]:
    """Return what a replay with this much emulated can and cannot show, a sentence each."""
    limits: list[str] = []
    if spec.device.type == "cpu":
        if emulated or spec.emulates_cuda:
            limits.append(
                "Emulated operations show what a GPU's arithmetic does to these values: range, rounding, and sums in "
                "FP32 up to their order."
            )
        limits.append(
            "A replay on a CPU cannot show defects of one GPU's kernels, races, or what a GPU's memory held before."
        )
    else:
        limits.append("A replay shows this GPU and these library versions; others may choose other kernels.")
    if any("8" in why and "linear" in why for why in emulated):
        limits.append("8-bit products are of linear layers only; delayed scaling and block scaling are not emulated.")
    if any("partial sums" in why for why in emulated):
        limits.append("How a GPU slices a sum depends on shape and model; here every slice has the same length.")
    return limits


def _asked_to_keep(model: nn.Module, settings: Settings) -> list[str]:
    """Return the modules that transformers would keep in FP32, as their class asks, and ``keep_fp32`` does not."""
    kept = kept_paths(model, settings.keep_fp32)
    wished: list[str] = []
    for _, owner in model.named_modules():
        names = [*(getattr(owner, name, None) or () for name in _KEPT_BY_TRANSFORMERS)]
        wished += [str(word) for group in names for word in group]
    found: list[str] = []
    for path, module in model.named_modules():
        asked = (
            any(word in path.split(".") for word in wished) and next(module.parameters(recurse=False), None) is not None
        )
        covered = any(path == k or path.startswith(f"{k}.") or k == "" for k in kept)
        if asked and not covered:
            found.append(path)
    return found


def conditions(spec: ReplaySpec, settings: Settings, trace: Trace, notes: tuple[str, ...]) -> dict[str, Any]:
    """Return how the lanes were run, what was emulated, and what a reader should know about it."""
    autocast = settings.mode == "autocast"
    followed = "cuda" if spec.emulates_cuda else spec.device.type
    policy = followed if autocast else None
    emulated: dict[str, Any] = {}
    drawn = {name: lane.drawn for name, lane in trace.lanes.items() if lane.drawn}
    if drawn:
        emulated["random draws made in FP32 and rounded"] = drawn
    for name, lane in trace.lanes.items():
        for why, counts in lane.emulated.items():
            emulated.setdefault(why, {})[name] = counts
    told = list(notes)
    if autocast and settings.autocast_policy != policy:
        told.append(
            f"autocast ran with PyTorch's {str(policy).upper()} operator lists, not the "
            f"{settings.autocast_policy.upper()} lists: PyTorch has no others for this device"
        )
    if autocast and spec.emulates_cuda and unknown_to_us():
        told.append(f"left alone, though CUDA's autocast changes them: {', '.join(unknown_to_us())}")
    if autocast and any(isinstance(module, _WITH_FUSED_PATHS) for module in spec.model.modules()):
        told.append(
            "fused paths of nn.MultiheadAttention and nn.TransformerEncoder are off in every lane, as under autocast"
        )
    converted = _asked_to_keep(spec.model, settings) if not autocast else []
    if converted:
        told.append(
            f"the model asks to keep {', '.join(converted)} in FP32, as from_pretrained(dtype=...) does; here they "
            f"were cast, as half() does. To replay them in FP32: keep_fp32: {json.dumps(converted)}"
        )
    if spec.attention in _ATTENTION:
        told.append(_ATTENTION[spec.attention])
    if has_compiled_parts(spec.model):
        told.append("compiled parts ran eagerly: compiled kernels keep FP32 where eager code rounds in between")
    for lane in (trace.reference, *trace.lanes.values()):
        told.extend(f"{lane.precision}: {note}" for note in lane.notes)
    scales = {name: lane.loss_scale for name, lane in trace.lanes.items()}
    return {
        "mode": settings.mode,
        "autocast_policy": policy,
        "attention": spec.attention,
        "fp8_scaling": spec.fp8_scaling,
        "tf32": spec.tf32,
        "reduced_precision_reduction": spec.reduced_precision_reduction,
        "flush_subnormals": spec.flush_subnormals,
        "loss_scale": max(scales.values(), default=1.0),
        "loss_scales": scales,
        "seed": settings.seed,
        "random_state": "restored from the bundle" if spec.random is not None else "from the seed",
        "train": spec.train,
        "backward": trace.reference.backward_ran,
        "local_error": spec.local_error,
        "keep_fp32": list(kept_paths(spec.model, settings.keep_fp32)),
        "batch_dim": spec.batch_dim,
        "batch_size": spec.batch_size,
        "emulated": emulated,
        "limits": _limits(spec, emulated),
        "notes": list(dict.fromkeys(told)),
    }
