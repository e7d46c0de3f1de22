"""All random state that a model may draw from: PyTorch on CPU and CUDA, Python's ``random``, NumPy's global generator.

A replay must leave the process as it found it, so the state is captured before and restored after. A bundle holds the
state of before the step that went bad; :meth:`RandomState.from_bundle` reads it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanprobe.errors import UsageError

__all__ = ["RandomState", "seed_all"]


def seed_all(seed: int) -> None:
    """Seed PyTorch (every device), Python's ``random`` and NumPy; NumPy takes the low 32 bits of the seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RandomState:
    """A snapshot of the random generators; None (or an empty tuple for CUDA) where a generator was not looked at.

    ``torch`` is a byte tensor, ``cuda`` one byte tensor per device, ``python`` what ``random.getstate()`` returns,
    ``numpy`` what ``numpy.random.get_state()`` returns in its tuple form.
    """

    torch: Tensor | None = None
    cuda: tuple[Tensor, ...] = ()
    python: tuple[Any, ...] | None = None
    numpy: tuple[str, Any, int, int, float] | None = None

    @classmethod
    def capture(cls) -> RandomState:
        """Return the present state; CUDA's only when CUDA is in use, since asking would start it."""
        legacy: Any = np.random.get_state(legacy=True)
        return replace(cls.capture_torch(), python=random.getstate(), numpy=legacy)

    @classmethod
    def capture_torch(cls) -> RandomState:
        """Return PyTorch's present state only: a fifth of the cost, for where nothing else can have been drawn from."""
        in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return cls(
            torch=torch.get_rng_state(),
            cuda=tuple(torch.cuda.get_rng_state_all()) if in_use else (),
        )

    def same_outside_torch(self, other: RandomState) -> bool:
        """Whether Python's and NumPy's generators are in the same state in both snapshots."""
        if self.python != other.python:
            return False
        if self.numpy is None or other.numpy is None:
            return self.numpy is other.numpy
        mine, theirs = self.numpy, other.numpy
        return mine[0] == theirs[0] and np.array_equal(mine[1], theirs[1]) and mine[2:] == theirs[2:]

    def restore(self) -> None:
        """Set every generator that this snapshot holds; CUDA states without a device to set are left out."""
        if self.torch is not None:
            torch.set_rng_state(self.torch)
        for index, state in enumerate(self.cuda[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, index)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)

    def not_restorable(self) -> str | None:
        """Return a sentence about the part that this machine cannot restore, None when it can restore all."""
        devices = torch.cuda.device_count()
        if len(self.cuda) <= devices:
            return None
        return (
            f"the random state of {len(self.cuda) - devices} of {len(self.cuda)} CUDA devices cannot be restored here; "
            "dropout and other random numbers drawn there differ from the original step"
        )

    def to_bundle(self) -> dict[str, Any]:
        """Return the state as a bundle stores it: tensors, numbers, text and lists, so that no pickle is needed."""
        bundle: dict[str, Any] = {"torch": self.torch, "cuda": list(self.cuda)}
        if self.python is not None:
            version, internal, gauss = self.python
            bundle["python"] = [version, list(internal), gauss]
        if self.numpy is not None:
            name, keys, position, has_gauss, gauss = self.numpy
            stored = torch.from_numpy(np.asarray(keys).astype(np.int64))
            bundle["numpy"] = [str(name), stored, int(position), int(has_gauss), float(gauss)]
        return bundle

    @classmethod
    def from_bundle(cls, bundle: Mapping[str, Any]) -> RandomState:
        """Read the ``rng`` of a bundle; UsageError naming the part that is not as it should be."""
        part = "torch"
        try:
            default = bundle.get("torch")
            if default is not None:
                default = _generator_state(default)
            part = "cuda"
            cuda = tuple(_generator_state(state) for state in bundle.get("cuda") or ())
            part = "python"
            python = bundle.get("python")
            if python is not None:
                version, internal, gauss = python
                python = (int(version), tuple(int(word) for word in internal), gauss)
                random.Random().setstate(python)
            part = "numpy"
            numpy: Any = bundle.get("numpy")
            if numpy is not None:
                numpy = _numpy_state(numpy)
                np.random.RandomState().set_state(numpy)
        except (TypeError, ValueError, LookupError, RuntimeError) as error:
            raise UsageError(f"the bundle's random state `rng.{part}` is damaged: {error}") from None
        return cls(torch=default, cuda=cuda, python=python, numpy=numpy)


def _generator_state(value: Any) -> Tensor:
    """Return a generator's state as the byte tensor on the CPU that PyTorch wants."""
    if not isinstance(value, Tensor) or value.dtype != torch.uint8:
        raise TypeError("expected a byte tensor")
    return value.cpu()


def _numpy_state(value: Any) -> tuple[str, Any, int, int, float]:
    """Return NumPy's state from a bundle's list (or mapping, in the same order)."""
    parts: Sequence[Any] = list(value.values()) if isinstance(value, Mapping) else value
    name, keys, position, has_gauss, gauss = parts
    words = keys.cpu().numpy() if isinstance(keys, Tensor) else np.asarray(keys)
    return str(name), words.astype(np.uint32), int(position), int(has_gauss), float(gauss)
