"""How a lane computes its products, beyond the dtype of its tensors: operand formats, sums, subnormals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from nanprobe.formats import NumberFormat, by_name
from nanprobe.lanes.spec import ReplaySpec

__all__ = ["Arithmetic", "arithmetic_of", "flushes_subnormals", "has_tf32", "subnormals_flushed"]

_FP8 = ("fp8-e4m3", "fp8-e5m2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """What is emulated in one lane; by default nothing.

    ``operands`` is the 8-bit format that inputs and weights of linear layers are quantised to and ``gradients`` that of
    the gradients in their backward; ``scaled`` says that each tensor is first scaled to the format's range. ``tf32``
    rounds the operands of FP32 products to TF32. ``partial_sums`` rounds the partial sums of half products to half.
    ``flush`` turns subnormal results into zeros.
    """

    operands: NumberFormat | None = None
    gradients: NumberFormat | None = None
    scaled: bool = True
    tf32: bool = False
    partial_sums: bool = False
    flush: bool = False

    @property
    def any(self) -> bool:
        """Whether anything is emulated at all."""
        return self.operands is not None or self.tf32 or self.partial_sums or self.flush


def has_tf32(device: torch.device) -> bool:
    """Whether the device itself multiplies in TF32: NVIDIA GPUs of compute capability 8.0 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def arithmetic_of(spec: ReplaySpec, precision: str, *, is_reference: bool) -> Arithmetic:
    """Return what is to be emulated in the lane of ``precision``; the reference is left as it is.

    On a GPU, TF32 and reduced-precision reductions are its own and switched by flags. Gradients take E5M2 where the
    forward takes E4M3, the HYBRID recipe of Transformer Engine.
    """
    if is_reference:
        return Arithmetic()
    on_cpu = spec.device.type == "cpu"
    return Arithmetic(
        operands=by_name(precision) if precision in _FP8 else None,
        gradients=by_name("fp8-e5m2") if precision in _FP8 else None,
        scaled=spec.fp8_scaling == "tensor",
        tf32=(precision == "tf32" or spec.tf32 is True) and not has_tf32(spec.device),
        partial_sums=on_cpu and spec.reduced_precision_reduction is True,
        flush=spec.flush_subnormals,
    )


def flushes_subnormals() -> bool:
    """Whether this thread's CPU flushes subnormals now. There is no way to ask but to compute one."""
    return float(torch.tensor([1e-39]) * 1.0) == 0.0


@contextlib.contextmanager
def subnormals_flushed(wanted: bool) -> Iterator[None]:
    """Have this thread's CPU flush FP32 and FP64 subnormals, operands and results, while the block runs."""
    if not wanted:
        yield
        return
    before = flushes_subnormals()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
