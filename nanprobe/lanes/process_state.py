"""Process-wide state that travels with the baton: random state, default dtype, and the flags that change numbers.

A lane sees the random numbers, the default dtype and the TF32 settings of its own, whatever the other lanes do; when
the replay ends the caller's are back. Flags that a PyTorch version does not have are left out.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from nanprobe.inputs.rng import RandomState

__all__ = ["ProcessState", "low_flags", "read_flags", "reference_flags"]


Flag = tuple[Callable[[], Any], Callable[[Any], None]]


def _attribute(owner: Any, name: str) -> Flag:
    return (lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


@functools.cache
def _flags() -> dict[str, Flag]:
    """Return the flags that this PyTorch can read without a warning or an error, by the name used in the report.

    Those of CUDA only where there is a GPU: they are read at every switch of lanes.
    """
    candidates: dict[str, Flag] = {
        "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "deterministic": (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            _set_deterministic,
        ),
        "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    }
    if torch.cuda.is_available():
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        candidates |= {
            "cudnn_allow_tf32": _attribute(cudnn, "allow_tf32"),
            "fp16_reduced_precision_reduction": _attribute(matmul, "allow_fp16_reduced_precision_reduction"),
            "bf16_reduced_precision_reduction": _attribute(matmul, "allow_bf16_reduced_precision_reduction"),
        }
    usable: dict[str, Flag] = {}
    for name, flag in candidates.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                flag[0]()
        except (RuntimeError, Warning, AttributeError):
            continue
        usable[name] = flag
    return usable


def read_flags() -> dict[str, Any]:
    """Return the flags that change numbers, by name, as they are in force now."""
    return {name: get() for name, (get, _) in _flags().items()}


def reference_flags() -> dict[str, Any]:
    """Return the settings under which FP32 is FP32 and nothing less: TF32 and reduced-precision reductions off."""
    return {
        "float32_matmul_precision": "highest",
        "cudnn_allow_tf32": False,
        "fp16_reduced_precision_reduction": False,
        "bf16_reduced_precision_reduction": False,
    }


def low_flags(*, tf32: bool | None, reduced_precision_reduction: bool | None) -> dict[str, Any]:
    """Return the settings of a low-precision lane; what is None stays as the caller has it."""
    flags: dict[str, Any] = {}
    if tf32 is not None:
        flags |= {"float32_matmul_precision": "high" if tf32 else "highest", "cudnn_allow_tf32": tf32}
    if reduced_precision_reduction is not None:
        flags["fp16_reduced_precision_reduction"] = reduced_precision_reduction
        flags["bf16_reduced_precision_reduction"] = reduced_precision_reduction
    return flags


class ProcessState:
    """A snapshot of the process-wide state that can be put back and taken again.

    ``everything`` says that Python's and NumPy's generators are swapped too, not PyTorch's alone.
    """

    def __init__(self, random: RandomState, flags: dict[str, Any], *, everything: bool = True) -> None:
        self.random = random
        self.flags = flags
        self._everything = everything

    @classmethod
    def capture(cls) -> ProcessState:
        """Take what is in force now."""
        return cls(RandomState.capture(), read_flags())

    def install(self) -> None:
        """Put this state in force."""
        self.random.restore()
        for name, (get, put) in _flags().items():
            if name in self.flags and get() != self.flags[name]:
                put(self.flags[name])

    def save(self) -> None:
        """Take what is in force now into this state."""
        self.random = RandomState.capture() if self._everything else RandomState.capture_torch()
        self.flags = read_flags()
