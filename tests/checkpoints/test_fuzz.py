"""Damaged files of every kind end in a problem, a refusal or good data, and in nothing else."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from nanprobe.checkpoints.inert import Span
from nanprobe.checkpoints.pickle_machine import _TABLE, PickleDamage, load_pickle
from nanprobe.checkpoints.pickle_source import PickleSource
from nanprobe.checkpoints.torch_objects import BUILDERS, persistent_value
from nanprobe.checkpoints.walk import walk
from tests.checkpoints.mutation import fixtures, run

CASES = 1500


def test_damaged_checkpoints(tmp_path: Path) -> None:
    targets = fixtures(tmp_path)
    outcomes, kinds, _, _ = run(targets, CASES)
    assert sum(outcomes.values()) == CASES
    assert set(kinds) == {target.kind for target in targets}
    assert outcomes["problems"] + outcomes["refused"] > CASES // 5
    assert outcomes["damaged data"]


def test_memory_of_damaged_checkpoints(tmp_path: Path) -> None:
    """Every allocation is followed here, which is slow, so there are fewer cases."""
    targets = fixtures(tmp_path)
    tracemalloc.start()
    run(targets, CASES // 5, first_seed=CASES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


OPCODES = st.sampled_from(sorted([*_TABLE, ord(".")])).map(lambda code: bytes([code]))
FRAGMENTS = st.sampled_from(
    [
        b"K\0",
        b"K\x02",
        b"X\x01\0\0\0a",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"ctorch._utils\n_rebuild_parameter\n",
        b"ctorch._tensor\n_rebuild_from_type_v2\n",
        b"ccollections\nOrderedDict\n",
        b"cbuiltins\ngetattr\n",
        b"ctorch\nFloatStorage\n",
        b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0aX\x03\0\0\0cpuK\x04tQ",
        b"q\0",
        b"h\0",
        b"\x85R",
        b"}",
        b"(",
        b")",
        b"]",
    ]
)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(st.lists(st.one_of(OPCODES, FRAGMENTS, st.binary(max_size=4)), max_size=40))
def test_programs_of_opcodes(parts: list[bytes]) -> None:
    data = b"".join(parts) + b"."
    try:
        value = load_pickle(PickleSource(None, data), persistent=persistent_value, builders=BUILDERS).value
    except PickleDamage:
        return
    assert not isinstance(value, Span) or value.length <= len(data)
    walk(value)
