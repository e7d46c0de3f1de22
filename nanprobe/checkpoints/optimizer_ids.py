"""Which parameter the number of an optimizer's state stands for.

PyTorch numbers parameters in the order in which they were given to the optimizer, and a checkpoint seldom says more.
The number can be told with certainty where the groups list names, and from the order of the model's own tensors where
the shapes of the moments fit it in one way only. In all other cases the raw keys stay: a wrong name is worse than none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from nanprobe.checkpoints.trees import mapping

__all__ = ["Candidate", "Groups", "names_of_ids"]

Shape = tuple[int, ...]
Candidate = tuple[str, Shape]
"""A parameter that the optimizer may hold: name and shape, in the model's order."""

Groups = Sequence[Any]

_MAX_IDS = 1_000_000


def names_of_ids(
    groups: Groups, shapes: Mapping[Hashable, Shape], parameters: Sequence[Candidate], *, ordered: bool
) -> dict[Hashable, str]:
    """Return the parameter's name by the number (or key) that the optimizer's state has.

    ``groups`` are the ``param_groups`` of the file, ``shapes`` those of the moments by number, ``parameters`` the
    model's; ``ordered`` says whether they stand in the model's order. Numbers that cannot be told are left out.
    """
    ids: list[list[Hashable]] = []
    names: dict[Hashable, str] = {}
    for group in groups:
        fields = mapping(group)
        listed = fields.get("params")
        if not isinstance(listed, (list, tuple)) or not all(type(key) in (int, str) for key in listed):
            return {}
        ids.append(list(listed))
        given = fields.get("param_names")
        if isinstance(given, (list, tuple)) and len(given) == len(listed):
            names.update({key: name for key, name in zip(listed, given, strict=True) if isinstance(name, str)})
    flat = [key for group in ids for key in group]
    if names or not flat or len(flat) > _MAX_IDS or len(set(flat)) < len(flat):
        return names
    if all(isinstance(key, str) for key in flat):
        return {key: str(key) for key in flat}
    ways: list[dict[Hashable, str]] = []
    if ordered and len(flat) == len(parameters):
        for order in (_sequential(ids, parameters), _by_decay(groups, ids, parameters)):
            if order is not None and _fits(order, shapes) and _named(order) not in ways:
                ways.append(_named(order))
    if len(ways) == 1:
        return ways[0]
    return _unique_shapes(flat, shapes, parameters)


Order = list[tuple[Hashable, Candidate]]


def _named(order: Order) -> dict[Hashable, str]:
    return {key: name for key, (name, _) in order}


def _fits(order: Order, shapes: Mapping[Hashable, Shape]) -> bool:
    known = [(shapes[key], shape) for key, (_, shape) in order if key in shapes]
    return bool(known) and all(left == right for left, right in known)


def _sequential(ids: list[list[Hashable]], parameters: Sequence[Candidate]) -> Order:
    """Pair numbers and parameters in order, one group after the other."""
    return list(zip((key for group in ids for key in group), parameters, strict=True))


def _by_decay(groups: Groups, ids: list[list[Hashable]], parameters: Sequence[Candidate]) -> Order | None:
    """Pair them as trainers do that exempt vectors (biases, norms) from weight decay by a group of their own."""
    if len(ids) != 2:
        return None
    decay = [mapping(group).get("weight_decay") for group in groups]
    matrices = [item for item in parameters if len(item[1]) > 1]
    vectors = [item for item in parameters if len(item[1]) <= 1]
    first, second = (vectors, matrices) if decay[0] == 0 and decay[1] != 0 else (matrices, vectors)
    if len(first) != len(ids[0]) or len(second) != len(ids[1]):
        return None
    return [*zip(ids[0], first, strict=True), *zip(ids[1], second, strict=True)]


def _unique_shapes(
    flat: list[Hashable], shapes: Mapping[Hashable, Shape], parameters: Sequence[Candidate]
) -> dict[Hashable, str]:
    """Pair those whose shape is that of one number and of one parameter only."""
    held = Counter(shapes[key] for key in flat if key in shapes)
    if len(flat) != len(parameters) or sum(held.values()) < len(flat):
        return {}
    there = Counter(shape for _, shape in parameters)
    owner = {shape: name for name, shape in parameters if there[shape] == 1}
    return {key: owner[shapes[key]] for key in flat if held[shapes[key]] == 1 and shapes[key] in owner}
