"""What a tensor is for, from its name, its place in the file and its type.

A zero bias is normal and a zero attention weight is not; an Inf in a mask is normal and in a weight never. So every
rule asks for the role first. Where a reader knows it from the format it has the last word; names decide otherwise. The
names are those of PyTorch's optimizers and modules, and of the libraries that quantise (GPTQ, AWQ, bitsandbytes, FP8).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from nanprobe.checkpoints.records import TensorEntry
from nanprobe.numerics.stored import is_floating

__all__ = ["FIRST_MOMENTS", "MOMENTS", "ROLES", "SECOND_MOMENTS", "Role", "role_of"]

ROLES = ("weight", "buffer", "moment", "step", "scale", "learning-rate", "ema", "rng", "other")

FIRST_MOMENTS = frozenset({"exp_avg", "momentum_buffer", "grad_avg", "exp_avg_slow", "exp_avg_fast", "m1"})
"""Optimizer states that follow the gradient and can have either sign."""

SECOND_MOMENTS = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf", "row_var", "col_var",
     "exp_avg_sq_row", "exp_avg_sq_col", "max_exp_avg_sqs", "nu"}
)  # fmt: skip
"""Optimizer states that are sums or means of squares (or largest magnitudes), and so never negative."""

MOMENTS = FIRST_MOMENTS | SECOND_MOMENTS | {"prev", "step_size", "ax", "exp_avg_diff", "neg_pre_grad", "d", "s", "z"}
"""Names of tensors under an optimizer's state."""

_STEPS = frozenset({"step", "steps"})
_UNAMBIGUOUS = frozenset(
    {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "exp_inf", "exp_avg_sq_row",
     "exp_avg_sq_col", "acc_delta"}
)  # fmt: skip
"""State names that no module uses, so that no optimizer has to be in sight."""

_BUFFERS = re.compile(
    r"(^|[._])(running_mean|running_var|num_batches_tracked|position_ids|inv_freq|masked_bias|causal_mask|attn_mask"
    r"|attention_mask|mask|rotary_emb\.\w+|cos_cached|sin_cached|freqs_cis|n_averaged|relative_position_index"
    r"|token_type_ids|_extra_state)$"
)
_SCALES = re.compile(
    r"^(\w+_)?(weight_scale|weight_scale_inv|weight_scale_2|input_scale|output_scale|k_scale|v_scale|q_scale|scale_inv"
    r"|scales|scaling_factor|absmax|SCB|quant_scale|scale_weight|scale_input|zero_points?|qzeros)$"
)
"""Last parts of the names of what quantised weights are multiplied with, or shifted by."""

_EMA = re.compile(
    r"(^|[._])(ema|model_ema|ema_model|ema_state_dict|state_dict_ema|ema_params|shadow_params|averaged_model|swa_model"
    r"|ema_weights|model_averaged)([._]|$)"
)
_RNG = re.compile(r"(^|[._])(\w*rng\w*|random_state\w*|cuda_random\w*|torch_random\w*)([._]|$)")
_OPTIMIZER = re.compile(r"(^|[._])(optim\w*|opt_state\w*|base_optimizer_state|fp32_optimizer\w*)([._]|$)")
_LEARNING_RATE = re.compile(r"(^|[._])(lr|initial_lr|learning_rate|base_lrs|_last_lr)([._]\d+)?$")


@dataclass(frozen=True, slots=True)
class Role:
    """``role`` is one of :data:`ROLES`; ``state`` the name of an optimizer's state ("exp_avg_sq"), "" for all else."""

    role: str
    state: str = ""


def role_of(entry: TensorEntry) -> Role:
    """Return what the tensor is for."""
    if entry.role is not None:
        known = _given(entry)
        if known is not None:
            return known
    name = entry.key or entry.name
    last = entry.name.rpartition(".")[2]
    file = os.path.basename(entry.file)
    if _RNG.search(name) or file.startswith(("rng_state", "random_states")):
        return Role("rng")
    if last in _UNAMBIGUOUS:
        return Role("moment", last)
    if _OPTIMIZER.search(name) or file.startswith(("optimizer", "optim")):
        return _optimizer_role(name, last)
    if last == "step" and len(entry.path) > 1 and entry.elements == 1 and "state" in entry.path:
        return Role("step", last)
    if _EMA.search(name):
        return Role("ema")
    if entry.parameter:
        return Role("weight")
    if _BUFFERS.search(name):
        return Role("buffer")
    if is_scale_name(last, entry):
        return Role("scale")
    if not is_floating(entry.dtype):
        return Role("weight" if entry.layout in ("quantized", "blocks") or last in ("weight", "qweight") else "buffer")
    return Role("weight")


def _given(entry: TensorEntry) -> Role | None:
    role = entry.role
    if role in ("weight", "ema", "rng", "scale"):
        return Role(role)
    if role in _STEPS:
        return Role("step", "step")
    if role in MOMENTS:
        return Role("moment", role or "")
    if role == "lr":
        return Role("learning-rate")
    if role == "optimizer":
        name = entry.key or entry.name
        return _optimizer_role(name, name.rpartition(".")[2])
    if role in ("callback", "scheduler", "bytes", "loss-scale", "scaler"):
        return Role("other", role or "")
    return None


def _optimizer_role(name: str, last: str) -> Role:
    if last in _STEPS:
        return Role("step", last)
    if last in MOMENTS:
        return Role("moment", last)
    if _LEARNING_RATE.search(name):
        return Role("learning-rate")
    return Role("other", "optimizer")


def is_scale_name(last: str, entry: TensorEntry) -> bool:
    """Return whether the last part of a name is that of a quantisation scale; "scale" alone may be a weight."""
    if last in ("scale", "zero_point"):
        return entry.dtype == "float8_e8m0fnu" or "quant" in entry.name
    return _SCALES.search(last) is not None
