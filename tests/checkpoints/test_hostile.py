"""Files made to do harm: nothing of them runs, and time and memory stay bounded."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanprobe.checkpoints import index_checkpoint
from nanprobe.checkpoints.inert import Foreign
from nanprobe.checkpoints.optimizer_ids import names_of_ids
from nanprobe.checkpoints.pickle_machine import Limits, PickleDamage, load_pickle
from nanprobe.checkpoints.pickle_source import PickleSource
from nanprobe.checkpoints.unsafe import dangerous
from nanprobe.checkpoints.walk import walk
from nanprobe.inputs.weights import read_state_dict
from tests.checkpoints import layouts


class Payload:
    """What an attacker stores: a call that leaves a file behind."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (eval, (f"open({str(self.target)!r}, 'w').close()",))


def load(data: bytes, **options: Any) -> Any:
    return load_pickle(PickleSource(None, data), **options).value


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", range(6))
def test_payload_is_reported_and_not_run(tmp_path: Path, protocol: int, zipped: bool) -> None:
    trace = tmp_path / "trace"
    path = tmp_path / "a.pt"
    state = {"w": torch.ones(2), "bad": Payload(trace)}
    torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    index = index_checkpoint(path)
    assert [problem.rule for problem in index.problems] == ["unsafe-pickle"]
    assert index.problems[0].evidence["name"] == "builtins.eval"
    assert torch.equal(read_state_dict(path)["w"], torch.ones(2))
    assert not trace.exists()
    if protocol == 0:
        return  # PyTorch cannot read its own files of protocol 0
    torch.load(path, weights_only=False)
    assert trace.exists(), "the payload of this test is a dud"


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("os.system", True),
        ("posix.system", True),
        ("builtins.eval", True),
        ("__builtin__.exec", True),
        ("torch.serialization.os.system", True),
        ("numpy.f2py.os.popen", True),
        ("subprocess.Popen", True),
        ("torch.hub.load", True),
        ("collections.OrderedDict", False),
        ("torch._utils._rebuild_tensor_v2", False),
        ("argparse.Namespace", False),
        ("numpy.core.multiarray._reconstruct", False),
        ("omegaconf.dictconfig.DictConfig", False),
        ("pathlib.PosixPath", False),
        ("my_project.models.Net", False),
        ("builtins.set", False),
        ("builtins.getattr", False),
    ],
)
def test_dangerous_names(name: str, bad: bool) -> None:
    assert dangerous(name) is bad


def test_a_chain_of_getattr_is_seen() -> None:
    data = b"cbuiltins\ngetattr\n(ctorch\nserialization\nS'os'\ntR."
    found = load_pickle(PickleSource(None, data))
    assert "torch.serialization.os" in found.foreign
    data = b"cbuiltins\ngetattr\n(cbuiltins\ngetattr\n(ctorch\nserialization\nS'os'\ntRS'system'\ntR."
    names = load_pickle(PickleSource(None, data)).foreign
    assert any(dangerous(name) for name in names)


def test_a_huge_memo_index_costs_nothing() -> None:
    tracemalloc.start()
    assert load(b"Nr\xff\xff\xff\xff.") is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    "data",
    [
        b"X\xff\xff\xff\x7f.",
        b"\x8d" + struct.pack("<Q", 1 << 62) + b".",
        b"B\xff\xff\xff\xffabc.",
        b"\x96" + struct.pack("<Q", (1 << 64) - 1) + b".",
        b"\x8b\xff\xff\xff\x7f.",
        b"\x8b\xff\xff\xff\xff.",
        b"I" + b"9" * 5000 + b"\n.",
        b"h\x05.",
        b"p-1\n.",
        b"s.",
        b"t.",
        b"(0e.",
        b"Na.",
        b"}N\x85R",
        b"",
        b".",
        b"\xff.",
        b"\x97.",
        b"V" + b"x" * 200_000,
        b"\x80\x02X\x02\0\0\0\xff\xff.",
        b"S'unfinished\n.",
        b"F1.5.5\n.",
    ],
)
def test_nonsense_is_damage(data: bytes) -> None:
    with pytest.raises(PickleDamage):
        load(data)


def test_long_strings_stay_in_the_file() -> None:
    value = load(b"B" + struct.pack("<I", 100_000) + bytes(100_000) + b".")
    assert (value.offset, value.length) == (5, 100_000)


def test_operations_are_limited() -> None:
    with pytest.raises(PickleDamage, match="more than 100 operations"):
        load(b"N0" * 100 + b"N.", limits=Limits(operations=100))


@pytest.mark.parametrize("depth", [50, 200_000])
def test_deep_nesting(depth: int) -> None:
    for data in (b"]" * depth + b"a" * (depth - 1) + b".", b")" + b"\x85" * depth + b"."):
        result = walk(load(data))
        assert bool(result.incomplete) == (depth > 100)


def test_a_deep_tuple_as_a_key() -> None:
    """Hashing such a tuple would run out of C stack."""
    value = load(b"})" + b"\x85" * 300_000 + b"Ns.")
    assert len(value) == 1


def test_keys_chosen_to_collide() -> None:
    keys = b"".join(b"\x8a\x0a" + (((1 << 61) - 1) * number).to_bytes(10, "little") + b"N" for number in range(20_000))
    assert len(load(b"}(" + keys + b"u.")) == 20_000


def test_a_tree_of_shared_references() -> None:
    """Forty levels, each naming the one below twice: 2**40 paths, 40 objects."""
    data = b"]q\0" + b"".join(b"]q" + bytes([n + 1]) + b"(h" + bytes([n]) + b"h" + bytes([n]) + b"e" for n in range(40))
    result = walk(load(data + b"."))
    assert result.incomplete


def test_an_object_that_contains_itself() -> None:
    assert walk(load(b"]q\0h\0a.")).tensors == []


def test_copies_are_limited() -> None:
    """An ordered dictionary made again and again from one long list."""
    pairs = b"](" + b"NN\x86" * 1000 + b"eq\0"
    data = pairs + b"ccollections\nOrderedDict\nq\x01" + b"h\x01h\0\x85R0" * 2000 + b"."
    with pytest.raises(PickleDamage, match="copies more"):
        load(data, limits=Limits(ratio=1 << 20))
    with pytest.raises(PickleDamage, match="far more memory"):
        load(data)


def test_stand_ins_hold_no_callables() -> None:
    value = load(pickle.dumps(Payload(Path("x"))))
    assert isinstance(value, Foreign)
    assert not any(callable(getattr(value, name)) for name in value.__slots__)


@pytest.mark.parametrize("name", ["os.system", "torch.load"])
def test_a_name_is_never_imported(name: str) -> None:
    code = (
        "import sys; from nanprobe.checkpoints.pickle_machine import load_pickle\n"
        "from nanprobe.checkpoints.pickle_source import PickleSource\n"
        "load_pickle(PickleSource(None, b'cwave\\nopen\\n.'))\n"
        "import nanprobe.checkpoints\n"
        "assert 'wave' not in sys.modules and 'torch' not in sys.modules"
    )
    assert name
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_a_compression_bomb_in_the_objects(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as file, file.open("a/data.pkl", "w") as member:
        for _ in range(300):
            member.write(bytes(1 << 20))
    tracemalloc.start()
    problem = index_checkpoint(tmp_path / "a.pt").problems[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert problem.rule == "not-scanned"
    assert peak < 1 << 22


def test_overlapping_members(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    first = data.find(b"PK\1\2")
    second = data.find(b"PK\1\2", first + 4)
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    (tmp_path / "a.pt").write_bytes(data)
    assert "overlap" in index_checkpoint(tmp_path / "a.pt").problems[0].message


def test_metadata_that_describes_one_long_list_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that share a long list of blocks: some bytes of pickle, any number of blocks."""
    layouts.split_dcp(tmp_path)

    def change(metadata: Any) -> None:
        described = metadata.state_dict_metadata["w"]
        described.chunks = described.chunks * 500
        metadata.state_dict_metadata.update({f"w{number}": described for number in range(1000)})

    layouts.edit_metadata(tmp_path, change)
    monkeypatch.setattr("nanprobe.checkpoints.dcp._MAX_BLOCKS", 10_000)
    index = index_checkpoint(tmp_path)
    assert "more than 10,000 blocks" in index.problems[-1].message
    assert len(index.tensors) == 10
    assert len(index.tensors[0].pieces) == 2


def test_groups_that_share_one_long_list() -> None:
    group = {"params": list(range(100_000))}
    assert names_of_ids([group] * 100_000, {0: (2,)}, [("a", (2,))], ordered=True) == {}


def test_a_compressed_member_that_claims_too_much(tmp_path: Path) -> None:
    """DEFLATE makes at most 1,032 bytes of one; nothing is set aside for a claim beyond that."""
    np.savez_compressed(tmp_path / "a.npz", a=np.ones(100))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    at = data.find(b"PK\1\2")
    data[at + 24 : at + 28] = (1 << 31).to_bytes(4, "little")
    (tmp_path / "a.npz").write_bytes(data)
    tracemalloc.start()
    problem = index_checkpoint(tmp_path / "a.npz").problems[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert problem.rule == "corrupt-file"
    assert "cannot make" in problem.message
    assert peak < 1 << 22
