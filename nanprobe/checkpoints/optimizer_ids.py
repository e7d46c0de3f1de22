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
    if ordered:
        return _agreed(
            [
                _embedded([(flat, list(parameters))], shapes),
                _embedded(_by_decay(groups, ids, parameters), shapes),
            ]
        )
    return _unique_shapes(flat, shapes, parameters)


Runs = list[tuple[list[Hashable], list[Candidate]]]
"""Numbers and the parameters that they are among, both in order."""


def _agreed(ways: Sequence[dict[Hashable, str] | None]) -> dict[Hashable, str]:
    """Return what all ways that are possible say alike."""
    possible = [way for way in ways if way is not None]
    if not possible:
        return {}
    first = possible[0]
    return {key: name for key, name in first.items() if all(way.get(key) == name for way in possible[1:])}


def _embedded(runs: Runs, shapes: Mapping[Hashable, Shape]) -> dict[Hashable, str] | None:
    """Return the names of the numbers that can stand for one parameter only, None when the shapes do not fit.

    Between the numbered parameters the model may hold others (buffers, frozen ones). Every way to pair them in order
    lies between the pairing that takes each as early as possible and the one that takes each as late as possible;
    where these two agree, all do.
    """
    if not runs or not any(key in shapes for ids, _ in runs for key in ids):
        return None
    names: dict[Hashable, str] = {}
    for ids, candidates in runs:
        early = _earliest(ids, candidates, shapes)
        late = _earliest(ids[::-1], candidates[::-1], shapes)
        if early is None or late is None:
            return None
        last = len(candidates) - 1
        for key, first, second in zip(ids, early, reversed(late), strict=True):
            if first == last - second:
                names[key] = candidates[first][0]
    return names


def _earliest(
    ids: Sequence[Hashable], candidates: Sequence[Candidate], shapes: Mapping[Hashable, Shape]
) -> list[int] | None:
    """Return the first possible position for each number in turn, None when one finds no place."""
    places: list[int] = []
    at = 0
    for key in ids:
        shape = shapes.get(key)
        while at < len(candidates) and shape is not None and candidates[at][1] != shape:
            at += 1
        if at >= len(candidates):
            return None
        places.append(at)
        at += 1
    return places


def _by_decay(groups: Groups, ids: list[list[Hashable]], parameters: Sequence[Candidate]) -> Runs:
    """Pair them as trainers do that exempt vectors (biases, norms) from weight decay by a group of their own."""
    if len(ids) != 2:
        return []
    decay = [mapping(group).get("weight_decay") for group in groups]
    matrices = [item for item in parameters if len(item[1]) > 1]
    vectors = [item for item in parameters if len(item[1]) <= 1]
    swapped = decay[0] == 0 and decay[1] != 0
    return [(ids[0], vectors), (ids[1], matrices)] if swapped else [(ids[0], matrices), (ids[1], vectors)]


def _unique_shapes(
    flat: list[Hashable], shapes: Mapping[Hashable, Shape], parameters: Sequence[Candidate]
) -> dict[Hashable, str]:
    """Pair those whose shape is that of one number and of one parameter only, where no order helps."""
    held = Counter(shapes[key] for key in flat if key in shapes)
    if len(flat) > len(parameters) or sum(held.values()) < len(flat):
        return {}
    there = Counter(shape for _, shape in parameters)
    owner = {shape: name for name, shape in parameters if there[shape] == 1}
    return {key: owner[shapes[key]] for key in flat if held[shapes[key]] == 1 and shapes[key] in owner}
