"""What comes after backward: the gradients are unscaled and checked, clipped, and one optimizer step is taken.

This is done as training does it, on the lane's own parameters: gradients keep the dtype of their parameter, the total
norm is computed by ``torch.nn.utils.clip_grad_norm_`` and a step whose gradients are non-finite is skipped, as
``torch.amp.GradScaler`` does. Beside it every parameter's update is computed once more in FP64, from the same weight,
gradient and state; an element that should have moved and did not has lost its update to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from nanprobe.lanes.step_facts import ParameterStep, StepFact, StepOrigin
from nanprobe.numerics.stats import is_finite, measure
from nanprobe.numerics.tree import map_tensors, named_tensors
from nanprobe.out_of_memory import is_out_of_memory
from nanprobe.records import Gradient

__all__ = ["StepSpec", "take_step"]

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0, 0.5, 2000
"""How ``torch.amp.GradScaler`` changes its scale unless it is told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSpec:
    """What is done with the gradients: clipping to a total norm, an optimizer, and its state of before the step.

    ``state`` is by the parameter's name. ``scaler`` is the state of the
    training run's gradient scaler, as ``GradScaler.state_dict()`` has it.
    """

    clip_grad_norm: float | None = None
    make: MakeOptimizer | None = None
    state: Mapping[str, Mapping[str, Any]] | None = None
    scaler: Mapping[str, Any] = field(default_factory=dict)


def take_step(
    model: nn.Module, spec: StepSpec, measured: Mapping[str, Gradient], *, scale: float, scaled: bool
) -> StepFact:
    """Unscale by ``scale``, check, clip and step; ``scaled`` says that the lane trains with a gradient scaler.

    ``measured`` are the gradients' figures by parameter. The parameters of ``model`` and their gradients are changed.
    """
    named = {n: p for n, p in model.named_parameters() if p.requires_grad and p.grad is not None}
    finite = not any(g.nan or g.posinf or g.neginf for g in measured.values())
    elements = sum(p.numel() for p in named.values())
    norms = [g.norm for g in measured.values() if g.norm is not None]
    fact = StepFact(
        gradient_norm=math.sqrt(sum(norm * norm for norm in norms)) if finite and norms else None,
        zero_share=sum(g.zero for g in measured.values()) / elements if elements else 0.0,
        finite=finite,
        skipped=scaled and not finite,
        loss_scale=scale if scaled else None,
        next_scale=_next_scale(scale, spec.scaler, finite=finite) if scaled else None,
        refused=_refused(named) if scaled and spec.make is not None else (),
    )
    if not finite or not named or (spec.clip_grad_norm is None and spec.make is None):
        return fact
    with torch.no_grad(), torch.autocast(next(iter(named.values())).device.type, enabled=False):
        if scale != 1.0:
            for parameter in named.values():
                assert parameter.grad is not None
                parameter.grad.mul_(1.0 / scale)
        if spec.clip_grad_norm is not None:
            fact = _clip(named, spec.clip_grad_norm, fact)
        if spec.make is not None:
            fact = _step(named, spec, spec.make, fact)
    return fact


def _refused(named: Mapping[str, nn.Parameter]) -> tuple[str, ...]:
    """Return the parameters whose gradients a gradient scaler refuses to unscale."""
    return tuple(name for name, parameter in named.items() if parameter.dtype is torch.float16)


def _next_scale(scale: float, state: Mapping[str, Any], *, finite: bool) -> float:
    """Return the scale that a gradient scaler goes on with."""

    def setting(name: str, default: float) -> float:
        value = state.get(name)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    if not finite:
        return scale * setting("backoff_factor", BACKOFF_FACTOR)
    tracked = setting("_growth_tracker", 0.0) + 1
    if tracked < setting("growth_interval", GROWTH_INTERVAL):
        return scale
    return scale * setting("growth_factor", GROWTH_FACTOR)


def _clip(named: Mapping[str, nn.Parameter], limit: float, fact: StepFact) -> StepFact:
    watch = StepWatch({})
    try:
        with watch:
            norm = float(torch.nn.utils.clip_grad_norm_(list(named.values()), limit, foreach=False))
    except Exception as error:  # PyTorch's own, as for sparse gradients
        if is_out_of_memory(error):
            raise
        return fact.changed(error=_told("clipping", error))
    gradients = [p.grad for p in named.values() if p.grad is not None]
    return fact.changed(
        total_norm=norm,
        clip_coefficient=min(1.0, limit / (norm + 1e-6)) if not math.isnan(norm) else math.nan,
        norm_origin=watch.origin if not math.isfinite(norm) else None,
        cleared=not math.isfinite(norm) and all(not bool(torch.count_nonzero(torch.nan_to_num(g))) for g in gradients),
    )


def _step(named: Mapping[str, nn.Parameter], spec: StepSpec, make: MakeOptimizer, fact: StepFact) -> StepFact:
    parameters = list(named.values())
    watch = StepWatch({id(p): name for name, p in named.items()})
    before = {name: p.detach().clone() for name, p in named.items()}
    try:
        optimizer = make(parameters)
        kept = _load(optimizer, spec.state, named) if spec.state else {}
        with watch:
            optimizer.step()
    except Exception as error:  # the optimizer's own: unlike gradients, a state that does not fit
        if is_out_of_memory(error):
            raise
        return fact.changed(error=_told("the optimizer step", error))
    steps: list[ParameterStep] = []
    for name, parameter in named.items():
        steps.append(_judged(name, before.pop(name), parameter, make, kept.get(id(parameter)), watch.wrote.get(name)))
    return fact.changed(stepped=True, origin=watch.origin, parameters=tuple(steps))


def _told(what: str, error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{what} raised {type(error).__name__}: {first}"


def _load(
    optimizer: Optimizer, state: Mapping[str, Mapping[str, Any]], named: Mapping[str, nn.Parameter]
) -> dict[int, dict[str, Any]]:
    """Load the state that was saved, cast as PyTorch casts it; return copies of it by the identity of the parameter."""
    groups = optimizer.state_dict()["param_groups"]
    # Loading keeps the tensors that need no cast, and the step writes to them.
    known = {n: map_tensors(torch.clone, dict(state[name])) for n, name in enumerate(named) if name in state}
    optimizer.load_state_dict({"state": known, "param_groups": groups})
    return {id(p): map_tensors(torch.clone, dict(optimizer.state[p])) for p in named.values() if p in optimizer.state}


def _judged(
    name: str,
    before: torch.Tensor,
    parameter: nn.Parameter,
    make: MakeOptimizer,
    state: dict[str, Any] | None,
    op: str | None,
) -> ParameterStep:
    after = parameter.detach()
    stats = measure(after)
    still = after == before
    exact = _exact_update(before, parameter.grad, make, state)
    moved = lost = 0
    largest: float | None = None
    agrees = True
    if exact is not None:
        wide = before.to(torch.float64)
        if after.dtype is torch.float32 and not stats.bad:
            apart = torch.linalg.vector_norm(after.to(torch.float64) - wide - exact)
            agrees = bool(apart <= _ALIKE * torch.linalg.vector_norm(exact) + _spacing(wide))
        # An update that FP32 weights would round away as well is no fault of this format.
        moves = (wide + exact).to(torch.float32) != before.to(torch.float32)
        moved = int(torch.count_nonzero(moves))
        lost = int(torch.count_nonzero(moves & still))
        largest = float(exact.abs().max()) if exact.numel() else None
    bad = ~torch.isfinite(after)
    at = torch.nonzero(bad)[0].tolist() if stats.bad else None
    return ParameterStep(
        parameter=name,
        dtype=str(after.dtype).removeprefix("torch."),
        elements=after.numel(),
        nan=stats.nan,
        posinf=stats.posinf,
        neginf=stats.neginf,
        index=tuple(at) if at is not None else None,
        changed=after.numel() - int(torch.count_nonzero(still)),
        moved=moved,
        lost=lost,
        update_absmax=largest,
        weight_absmax=stats.absmax,
        op=op,
        by_itself=agrees,
    )


_ALIKE = 0.1
"""How far FP32's update of a parameter may be from FP64's (2-norm, relative) if parameters are treated one by one."""


def _spacing(weights: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm of what rounding each new weight to FP32 may add."""
    size: torch.Tensor = torch.linalg.vector_norm(weights)
    return size * torch.finfo(torch.float32).eps


def _exact_update(
    before: torch.Tensor, gradient: torch.Tensor | None, make: MakeOptimizer, state: dict[str, Any] | None
) -> torch.Tensor | None:
    """Return the update that FP64 makes of the same weight, gradient and state; None when it cannot be computed.

    Optimizers that treat each parameter by itself are computed rightly, and nearly all do.
    """
    if gradient is None or gradient.layout is not torch.strided or before.is_complex():
        return None
    twin = nn.Parameter(before.to(torch.float64))
    twin.grad = gradient.detach().to(torch.float64)
    try:
        optimizer = make([twin])
        if state:
            optimizer.state[twin] = {
                key: value.to(torch.float64) if isinstance(value, torch.Tensor) and value.dim() else value
                for key, value in map_tensors(torch.clone, state).items()
            }
        optimizer.step()
    except Exception as error:  # the optimizer's own: FP64 is more than it was written for
        if is_out_of_memory(error):
            raise
        return None
    return twin.detach() - before.to(torch.float64)


class StepWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves __init_subclass__ untyped
    """Finds the first operation that makes something non-finite of finite operands, and what writes each parameter."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """``names`` names parameters by the identity of their tensors."""
        super().__init__()  # type: ignore[no-untyped-call]  # and __init__ as well
        self.origin: StepOrigin | None = None
        self.wrote: dict[str, str] = {}
        self._names = names

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare every operation the detour by which a mode is hidden from the compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and look at its result."""
        kwargs = kwargs or {}
        name = str(func._schema.name).replace("::", ".")
        written = self._names.get(id(args[0])) if args and func._schema.is_mutable else None
        if written is not None:
            self.wrote[written] = name
        if self.origin is not None:
            return func(*args, **kwargs)
        operands = [t for _, t in named_tensors((args, kwargs)) if t.dtype.is_floating_point]
        kept = [t.detach().clone() for t in operands] if func._schema.is_mutable else operands
        result = func(*args, **kwargs)
        bad = next((t for _, t in named_tensors(result) if t.dtype.is_floating_point and not is_finite(t)), None)
        if bad is not None and all(is_finite(t) for t in kept):
            self.origin = _origin(name, written, kept, bad)
        return result


def _origin(name: str, parameter: str | None, operands: list[torch.Tensor], bad: torch.Tensor) -> StepOrigin:
    where = ~torch.isfinite(bad)
    index = tuple(torch.nonzero(where)[0].tolist())
    absmaxes = [s.absmax for s in (measure(t) for t in operands) if s.absmax is not None]
    return StepOrigin(
        op=name,
        parameter=parameter,
        dtype=str(bad.dtype).removeprefix("torch."),
        count=int(torch.count_nonzero(where)),
        elements=bad.numel(),
        index=index,
        operands=tuple(float(t[index]) for t in operands if t.shape == bad.shape),
        input_absmax=max(absmaxes, default=None),
    )
