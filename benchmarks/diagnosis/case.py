"""What a case of the suite is: a small model with a fault or without, and what is true about it.

What is expected is derived from the arithmetic of the model, never from what a tool prints. Where two names are both a
fair description (``aten.addmm`` and ``aten.mm`` of one linear layer), a set holds both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["ANY", "LINEAR", "PRODUCT", "Built", "Control", "Expected", "Fault", "control", "fault"]

ANY = "any"
"""Stands in ``samples`` for what is not judged: a fault of a weight, a drift that every sample shares."""

LINEAR = frozenset({"aten.addmm", "aten.mm"})
"""What a linear layer dispatches, with and without a bias, or where views make the one into the other."""

PRODUCT = frozenset({"aten.bmm", "aten.baddbmm", "aten.mm"})
"""What a product of activations dispatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A model, one batch, and the loss if there is one, called as loss(output, batch)."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any, Any], Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a right diagnosis names; every set holds all the names that are right."""

    phase: frozenset[str]
    module: frozenset[str | None]
    op: frozenset[str | None]
    mechanism: frozenset[str]
    precision_related: bool
    samples: tuple[int, ...] | str | None
    silent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One model with one fault, in one precision.

    ``reported`` names public threads in which people met it. ``settings`` are those of :func:`nanprobe.replay`.
    ``seed`` is set before ``build`` runs.
    """

    name: str
    family: str
    reported: tuple[str, ...]
    build: Callable[[], Built]
    dtype: str
    expected: Expected
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A healthy model, or one that only looks like a fault: no finding of severity error is right."""

    name: str
    family: str
    build: Callable[[], Built]
    dtype: str
    settings: Mapping[str, Any] = field(default_factory=dict)


FAULTS: list[Fault] = []
CONTROLS: list[Control] = []


def _family(build: Callable[[], Built]) -> str:
    return build.__module__.rpartition(".")[2]


def _set(value: Any) -> frozenset[Any]:
    return frozenset(value) if isinstance(value, (set, frozenset)) else frozenset({value})


def fault(
    dtype: str,
    *reported: str,
    at: str | set[str | None] | None,
    op: str | set[str | None] | frozenset[str] | None,
    mechanism: str | set[str],
    precision_related: bool = True,
    samples: tuple[int, ...] | str | None = ANY,
    phase: str | set[str] = "forward",
    silent: bool = False,
    name: str | None = None,
    **settings: Any,
) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Register what follows as a fault; several decorators make variants of it."""

    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        variant = name or f"{build.__name__}-{dtype}-{settings.get('mode', 'autocast')}"
        expected = Expected(
            phase=_set(phase),
            module=_set(at),
            op=_set(op),
            mechanism=_set(mechanism),
            precision_related=precision_related,
            samples=samples,
            silent=silent,
        )
        made = Fault(
            name=variant,
            family=_family(build),
            reported=reported,
            build=build,
            dtype=dtype,
            expected=expected,
            settings=settings,
        )
        FAULTS.append(made)
        return build

    return register


def control(
    dtype: str, *, name: str | None = None, **settings: Any
) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Register what follows as a control."""

    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        variant = name or f"{build.__name__}-{dtype}-{settings.get('mode', 'autocast')}"
        CONTROLS.append(Control(name=variant, family=_family(build), build=build, dtype=dtype, settings=settings))
        return build

    return register


def built(case: Fault | Control) -> Built:
    """Build a case from the same random numbers every time."""
    torch.manual_seed(0)
    return case.build()
