"""What the operation trace has to do about each kind of dispatched operation, told once from its schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nanprobe.lanes.exact import operation_name, repeatable

__all__ = ["ALLOCATING", "OVERWRITES", "Plan", "plan_of"]

ALLOCATING = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
"""Operations, without namespace and overload, whose result holds whatever the memory held."""

_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_")
"""Operations whose result holds whatever the memory held: no values yet."""

OVERWRITES = ("copy_", "fill_", "zero_", "random_", "normal_", "uniform_", "bernoulli_", "exponential_", "geometric_",
    "cauchy_", "log_normal_")  # fmt: skip
"""Operations that write to an operand without reading it, beside those with ``out=``."""

_SUMS = ("add", "add_", "sub", "sub_", "rsub")

_WITH_BOUNDS = (
    *("clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "hardtanh", "hardtanh_", "threshold"),
    *("full", "full_like", "new_full", "fill", "fill_", "masked_fill", "masked_fill_", "scalar_tensor"),
)
"""Operations that turn a number among their arguments into the result's own format."""


_MOVING = (
    *("_to_copy", "to", "copy", "copy_", "clone", "cat", "stack", "expand_copy", "repeat", "index", "index_select"),
    *(
        "gather",
        "tril",
        "triu",
        "where",
        "masked_fill",
        "masked_fill_",
        "constant_pad_nd",
        "contiguous",
        "roll",
        "flip",
    ),
)
"""Operations whose result holds the values of their operands, in another place or format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to treat one operation.

    ``passes``: there is nothing to look at. ``written`` are the positions of the arguments it writes to, ``outs`` the
    names of its ``out=`` arguments; ``reads`` says whether what it writes to is an operand as well. ``again`` says
    that it can be evaluated once more, ``moves`` that its result holds its operands' values. ``dropout`` is the
    position of the share that attention drops at random.
    """

    name: str
    passes: bool
    written: tuple[int, ...]
    outs: tuple[str, ...]
    reads: bool
    again: bool
    is_sum: bool
    is_cast: bool
    has_bounds: bool
    moves: bool
    dropout: int | None = None

    @property
    def writes(self) -> bool:
        """Whether it writes to any of its arguments."""
        return bool(self.written or self.outs)

    def repeats(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call can be evaluated once more: nothing is drawn, or nothing of what is drawn is dropped."""
        if self.again or self.dropout is None:
            return self.again
        share = args[self.dropout] if len(args) > self.dropout else kwargs.get("dropout_p", 0.0)
        return bool(share == 0.0)


def plan_of(func: Any) -> Plan:
    """Return the plan of a dispatched operation (an ``OpOverload``)."""
    schema = func._schema
    name = operation_name(func)
    base = name.rpartition(".")[2]
    written: list[int] = []
    outs: list[str] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if argument.kwarg_only:
                outs.append(argument.name)
            else:
                written.append(position)
    is_view = bool(schema.returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )
    return Plan(
        name=name,
        passes=is_view or base in _UNWRITTEN or not (schema.returns or written or outs),
        written=tuple(written),
        outs=tuple(outs),
        reads=not outs and base not in OVERWRITES,
        again=repeatable(func),
        is_sum=base in _SUMS,
        is_cast=base == "_to_copy" and torch.Tag.nondeterministic_seeded not in func.tags,
        has_bounds=base in _WITH_BOUNDS,
        moves=base in _MOVING,
        dropout=next((n for n, a in enumerate(schema.arguments) if a.name == "dropout_p"), None),
    )
