"""What each tensor is called and what it is: a parameter, a state of the optimizer, a copy, a part of a random state.

Training scripts keep weights under ``model`` or ``state_dict``, optimizer states under numbers, averaged copies under
``ema``. Here the place of a tensor in its file becomes the name that a person uses: the parameter's own, or
``<parameter>.<state>``. Nothing but keys, shapes and the optimizer's groups is looked at.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nanprobe.checkpoints.optimizer_ids import Candidate, names_of_ids
from nanprobe.checkpoints.parts import Part
from nanprobe.checkpoints.records import TensorEntry
from nanprobe.checkpoints.trees import mapping
from nanprobe.checkpoints.walk import join_name

__all__ = ["STATES", "name_tensors"]

WRAPPERS = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "net",
    "network",
    "weights",
    "params",
)
"""Keys under which training scripts keep the model, in the order in which they are tried."""

STATES = frozenset(
    {
        *("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "sum"),
        *("acc_delta", "mu_product", "exp_inf", "row_var", "col_var", "prev", "step_size", "eta", "mu", "ax"),
        *("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_diff", "momentum", "variance", "param"),
        *("fp32_param", "master_param", "master", "fp32_from_fp16"),
        *("state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2"),
    }
)
"""Names of optimizer states that PyTorch's and other common optimizers use."""

_MASTERS = frozenset({"fp32_param", "master_param", "master", "fp32_from_fp16", "fp32"})

_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq", "position_ids", "attn_mask")

_EMA_NAMES = frozenset({"ema", "averaged_model", "swa_state_dict", "swa_model", "shadow_params", "teacher_ema"})

_MAX_WRAPPERS = 3


def name_tensors(part: Part) -> None:
    """Give the tensors of ``part`` their names, roles and parameters; its problems follow the names."""
    files: dict[str, list[int]] = {}
    for number, entry in enumerate(part.tensors):
        files.setdefault(_group(entry, part), []).append(number)
    named: dict[int, TensorEntry] = {}
    optimizers: list[_Optimizer] = []
    for file, numbers in files.items():
        scope = _Scope(part.trees.get(file), os.path.basename(file))
        prefix = _model_prefix([part.tensors[number] for number in numbers], scope.tree)
        for number in numbers:
            entry = part.tensors[number]
            if entry.key is None and entry.role is None:
                named[number] = _placed(entry, number, prefix, scope)
        optimizers.extend(scope.optimizers.values())
    for optimizer in optimizers:
        _name_states(optimizer, part, named, _parameters(part, named, optimizer.file))
    known = {entry.name for number, entry in named.items() if entry.role is None}
    known |= {entry.of for entry in part.tensors if entry.of is not None}
    for number, entry in list(named.items()):
        if entry.role == "ema":
            named[number] = replace(entry, of=_copied(entry, known))
    renamed = {
        (entry.file, entry.name): named[number].name
        for number, entry in enumerate(part.tensors)
        if number in named and named[number].name != entry.name
    }
    part.tensors[:] = [named.get(number, entry) for number, entry in enumerate(part.tensors)]
    if renamed:
        by_name = {name: new for (_, name), new in renamed.items()}
        part.problems[:] = [
            replace(
                problem, tensor=renamed.get((problem.file, problem.tensor), by_name.get(problem.tensor, problem.tensor))
            )
            if problem.tensor is not None
            else problem
            for problem in part.problems
        ]


def _group(entry: TensorEntry, part: Part) -> str:
    """Return the file whose object tree the tensor's path leads through; blocks of a distributed save have one."""
    if entry.file.endswith((".distcp", ".metadata")):
        return os.path.join(os.path.dirname(entry.file), ".metadata")
    return entry.file


@dataclass(slots=True)
class _Optimizer:
    """An optimizer of a file: its groups, and its states' entries by number and name."""

    groups: Any
    file: str
    place: tuple[Any, ...]
    states: dict[Hashable, dict[int, str]] = field(default_factory=dict)


@dataclass(slots=True)
class _Scope:
    """One file while its tensors are named."""

    tree: Any
    file: str
    optimizers: dict[tuple[Any, ...], _Optimizer] = field(default_factory=dict)


def _node(tree: Any, path: Iterable[Any]) -> Any:
    node = tree
    for key in path:
        if isinstance(node, (list, tuple)):
            node = node[key] if type(key) is int and 0 <= key < len(node) else None
        else:
            node = mapping(node).get(key)
        if node is None:
            return None
    return node


def _model_prefix(entries: list[TensorEntry], tree: Any) -> tuple[Any, ...]:
    """Return the keys under which the model lies in a file, () when it lies at the root."""
    prefix: tuple[Any, ...] = ()
    for _ in range(_MAX_WRAPPERS):
        depth = len(prefix)
        if tree is not None and depth and not isinstance(_node(tree, prefix), dict):
            break
        if tree is not None and not depth and not isinstance(tree, dict):
            break
        inner = Counter(
            entry.path[depth] for entry in entries if len(entry.path) > depth + 1 and entry.path[:depth] == prefix
        )
        direct = any(len(entry.path) == depth + 1 and entry.path[:depth] == prefix for entry in entries)
        wrapper = next((name for name in WRAPPERS if name in inner), None)
        if wrapper is None and depth == 0 and "app" in inner and len(inner) == 1:
            wrapper = "app"
        if wrapper is None or (depth and direct):
            break
        prefix = (*prefix, wrapper)
    return prefix


def _placed(entry: TensorEntry, number: int, prefix: tuple[Any, ...], scope: _Scope) -> TensorEntry:
    """Return the entry with what its place in the file says."""
    path = entry.path
    lower = [part.lower() if isinstance(part, str) else "" for part in path]
    if scope.file.startswith(("rng_state", "random_states")):
        return replace(entry, role="rng")
    state = _state_of(path, lower, scope.tree)
    if state is not None:
        where, key, name = state
        if where is not None:
            optimizer = scope.optimizers.setdefault(
                where, _Optimizer(mapping(_node(scope.tree, where)).get("param_groups"), entry.file, where)
            )
            optimizer.states.setdefault(key, {})[number] = name
            return replace(entry, role=_state_role(name))
        return _as_state(entry, str(key), name)
    if prefix and path[: len(prefix)] == prefix:
        inner = path[len(prefix) :]
        return _flat_ema(replace(entry, name=join_name(inner), key=entry.name)) if inner else entry
    role = _other_role(lower)
    if role == "weight-part":
        return replace(entry, name=join_name(path[1:]) or entry.name, key=entry.name)
    if role is not None:
        return replace(entry, role=role)
    return _flat_ema(entry)


def _state_role(name: str) -> str:
    first = name.split(".")[0]
    return "weight" if first in _MASTERS else first


def _as_state(entry: TensorEntry, parameter: str, name: str) -> TensorEntry:
    role = _state_role(name)
    shown = parameter if role == "weight" else f"{parameter}.{name}"
    return replace(entry, name=shown, key=entry.name, role=role, of=parameter)


def _state_of(
    path: tuple[Any, ...], lower: list[str], tree: Any
) -> tuple[tuple[Any, ...] | None, Hashable, str] | None:
    """Return (place of the optimizer, number or key, state's name); the place is None when the key is a name."""
    for at, part in enumerate(path[:6]):
        if part == "state" and len(path) > at + 2:
            owner = _node(tree, path[:at]) if tree is not None else None
            optimizer = "param_groups" in mapping(owner) or any(name.startswith("optim") for name in lower[:at])
            if not optimizer:
                continue
            key, name = path[at + 1], join_name(path[at + 2 :])
            if key in STATES and isinstance(path[at + 2], str):
                return None, join_name(path[at + 2 :]), str(key)
            if isinstance(key, str) and not key.isdigit():
                return None, key, name
            return path[:at], key, name
        if isinstance(part, str) and lower[at].startswith(("optim", "chained_")) and "state." in part:
            return _flat_state(join_name(path[at:]))
        if isinstance(part, str) and part.startswith("state.") and at and lower[at - 1].startswith("optim"):
            return _flat_state(join_name(path[at:]))
    return None


def _flat_state(name: str) -> tuple[None, Hashable, str] | None:
    """Return parameter and state of a flattened name: ``state.fc.weight.exp_avg`` or ``state.exp_avg.fc.weight``."""
    rest = name.partition("state.")[2]
    first, _, tail = rest.partition(".")
    if first in STATES and tail:
        return None, tail, first
    parameter, _, last = rest.rpartition(".")
    return (None, parameter, last) if parameter and last in STATES else None


def _other_role(lower: list[str]) -> str | None:
    """Return the role of a tensor that lies outside the model and the optimizer's states."""
    for part in lower[:4]:
        if part in _EMA_NAMES or part.startswith("ema_") or part.endswith("_ema"):
            return "ema"
        if "rng" in part.split("_") or part.startswith(("rng", "random_state", "torch_random", "cuda_random")):
            return "rng"
        if "scaler" in part:
            return "loss-scale" if lower[-1] in ("scale", "_scale", "cur_scale") else "scaler"
        if part.startswith(("lr_sched", "sched")) or part == "opt_param_scheduler":
            return "scheduler"
        if part.startswith(("callback", "loops", "dataloader", "data_sampler")):
            return "callback"
    if lower and lower[0] == "frozen_param_fragments":
        return "weight-part"
    if lower and lower[0].startswith("optim"):
        last = lower[-1] if lower[-1] in STATES else next((part for part in lower if part in STATES), None)
        masters = any("fp32" in part for part in lower)
        return "weight" if masters and last is None else last or "optimizer"
    return None


def _flat_ema(entry: TensorEntry) -> TensorEntry:
    return replace(entry, role="ema") if entry.name.startswith(("model_ema.", "ema.", "ema_model.")) else entry


def _copied(entry: TensorEntry, known: set[str]) -> str | None:
    """Return the parameter that an averaged copy is of, by its name."""
    parts = (entry.key or entry.name).split(".")
    for start in range(1, min(len(parts), 6)):
        rest = ".".join(parts[start:])
        for name in (rest, f"model.{rest}", f"module.{rest}"):
            if name in known:
                return name
    return None


def _parameters(part: Part, named: Mapping[int, TensorEntry], file: str) -> tuple[list[Candidate], bool]:
    """Return name and shape of the parameters that the optimizer in ``file`` may hold, and whether in order.

    They are the model's in the same file, or, when that holds none, in the files of the same folder.
    """
    own = [number for number, entry in enumerate(part.tensors) if entry.file == file]
    found = _candidates(part, named, own)
    if found[0]:
        return found
    folder = os.path.dirname(file)
    return _candidates(
        part, named, [number for number, entry in enumerate(part.tensors) if os.path.dirname(entry.file) == folder]
    )


def _candidates(part: Part, named: Mapping[int, TensorEntry], numbers: list[int]) -> tuple[list[Candidate], bool]:
    found: dict[str, tuple[int, ...]] = {}
    storages: set[tuple[Any, ...]] = set()
    ordered = True
    for number in numbers:
        entry = named.get(number, part.tensors[number])
        if entry.role is not None or entry.name.rpartition(".")[2] in _BUFFERS or not _floating(entry.dtype):
            continue
        if entry.path and isinstance(entry.path[0], str) and entry.path[0].lower().startswith(("optim", "callback")):
            continue
        place = tuple((piece.storage, piece.offset, piece.shape) for piece in entry.pieces)
        if place in storages and entry.elements:
            continue
        storages.add(place)
        if entry.file.endswith(".safetensors") or entry.rank:
            ordered = False
        found.setdefault(entry.name, entry.shape)
    return list(found.items()), ordered


def _floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def _name_states(
    optimizer: _Optimizer, part: Part, named: dict[int, TensorEntry], parameters: tuple[list[Candidate], bool]
) -> None:
    """Name the states of one optimizer whose keys are numbers."""
    groups = optimizer.groups if isinstance(optimizer.groups, (list, tuple)) else []
    shapes: dict[Hashable, tuple[int, ...]] = {}
    for key, entries in optimizer.states.items():
        seen = {named[number].shape for number, name in entries.items() if len(named[number].shape) and name != "step"}
        if len(seen) == 1:
            shapes[key] = next(iter(seen))
    found = names_of_ids(groups, shapes, parameters[0], ordered=parameters[1])
    part.ids[optimizer.file, optimizer.place] = dict(found)
    for key, entries in optimizer.states.items():
        parameter = found.get(key)
        if parameter is None:
            continue
        for number, name in entries.items():
            named[number] = _as_state(part.tensors[number], parameter, name)
