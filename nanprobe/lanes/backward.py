"""Finding the autograd node where a good gradient turned bad.

Only a lane whose gradients went bad is looked at this closely: it is run once more, alone, and every node of the loss's
graph gets a hook that looks at the gradients it hands on. The first node whose incoming gradients are finite and whose
outgoing ones are not is the origin. Nodes carry the sequence number they were made
with, and module visits know the range of numbers they spanned, so the node's module is the innermost visit whose range
holds its number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nanprobe.lanes.measures import bad_detail, health_of
from nanprobe.lanes.trace import BackwardOrigin
from nanprobe.numerics.stats import is_finite, measure

__all__ = ["NodeWatch", "forward_operation"]


class NodeWatch:
    """Remembers which visit made which autograd nodes, and watches the nodes during backward."""

    def __init__(self, batch_size: int | None, batch_dim: int) -> None:
        self.origin: BackwardOrigin | None = None
        self.sequence: int | None = None
        self.classes: dict[str, str] = {}
        self._batch_size = batch_size
        self._batch_dim = batch_dim
        self._ranges: list[tuple[int, int, str, int]] = []
        self._known: dict[int, tuple[str, int] | None] = {}

    def visited(self, first: int, stop: int, path: str, visit: int) -> None:
        """A visit made the nodes with sequence numbers in [first, stop)."""
        if stop > first:
            self._ranges.append((first, stop, path, visit))
            self._known.clear()

    def visit_of(self, sequence: int) -> tuple[str, int] | None:
        """Return (path, visit) of the innermost visit that made the node, None when it was made outside the model."""
        if sequence in self._known:
            return self._known[sequence]
        best: tuple[int, int, str, int] | None = None
        for candidate in self._ranges:
            inside = candidate[0] <= sequence < candidate[1]
            if inside and (best is None or candidate[1] - candidate[0] < best[1] - best[0]):
                best = candidate
        self._known[sequence] = (best[2], best[3]) if best is not None else None
        return self._known[sequence]

    def watch(self, loss: torch.Tensor) -> list[Callable[[], None]]:
        """Hook every node that the loss depends on; returns the functions that take the hooks off again."""
        if loss.grad_fn is None:
            return []
        removers: list[Callable[[], None]] = []
        seen = {loss.grad_fn}
        todo: list[Any] = [loss.grad_fn]
        while todo:
            node = todo.pop()
            removers.append(node.register_hook(partial(self._look, node)).remove)
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    todo.append(following)
        return removers

    def _look(self, node: Any, outgoing: tuple[Any, ...], incoming: tuple[Any, ...]) -> None:
        if self.origin is not None:
            return
        with torch._C._DisableTorchDispatch():
            self._look_at(node, outgoing, incoming)

    def _look_at(self, node: Any, outgoing: tuple[Any, ...], incoming: tuple[Any, ...]) -> None:
        for number, gradient in enumerate(outgoing):
            if isinstance(gradient, torch.Tensor) and not is_finite(gradient):
                given = [g for g in incoming if isinstance(g, torch.Tensor)]
                if all(is_finite(g) for g in given):
                    self._found(node, gradient, given, of_parameter=self._leads_to_leaf(node, number))
                return

    @staticmethod
    def _leads_to_leaf(node: Any, number: int) -> bool:
        """Whether a node's gradient number ``number`` goes to a leaf, through views and casts only, as a weight's does.

        Its first dimension is then no batch.
        """
        following = node.next_functions[number][0] if number < len(node.next_functions) else None
        while following is not None and len(following.next_functions) == 1:
            following = following.next_functions[0][0]
        return following is not None and following.name().endswith("AccumulateGrad")

    def _found(self, node: Any, gradient: torch.Tensor, given: list[torch.Tensor], *, of_parameter: bool) -> None:
        place = self.visit_of(node._sequence_nr()) if node.name() != "torch::autograd::AccumulateGrad" else None
        self.origin = BackwardOrigin(
            module=place[0] if place else None,
            visit=place[1] if place else None,
            class_=self.classes.get(place[0]) if place else None,
            node=node.name(),
            op=forward_operation(node.name()),
            health=health_of([measure(gradient)]),
            detail=bad_detail(
                "",
                gradient,
                batch_size=None if of_parameter else self._batch_size,
                batch_dim=self._batch_dim,
                gradient=True,
            ),
            masked=_zero_where_bad(gradient, given),
        )
        self.sequence = int(node._sequence_nr())


def forward_operation(node: str) -> str | None:
    """Return the operation that an autograd node of PyTorch's own differentiates, None for a custom function.

    Nodes are named after operations in another spelling: ``LogSoftmaxBackward0`` is the derivative of ``_log_softmax``.
    """
    found = re.fullmatch(r"(\w+?)Backward\d+", node)
    if found is None:
        return None
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", found.group(1)).lower()
    for candidate in (name, f"_{name}", f"native_{name}"):
        if hasattr(torch.ops.aten, candidate):
            return f"aten.{candidate}"
    return None


def _zero_where_bad(gradient: torch.Tensor, given: list[torch.Tensor]) -> bool:
    """Whether one gradient of the same shape came in, and is zero in every element where ``gradient`` is bad."""
    alike = [g for g in given if g.shape == gradient.shape and g.layout is torch.strided]
    if len(given) != 1 or not alike or gradient.layout is not torch.strided:
        return False
    return not bool((alike[0].detach()[~torch.isfinite(gradient.detach())] != 0).any())
