"""What is wrong with the structure of a checkpoint is found before any value is read, and only what is wrong."""

from __future__ import annotations

import gzip
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nanprobe.checkpoints import CheckpointIndex, Damage, index_checkpoint, stream_extent
from nanprobe.errors import UsageError
from tests.checkpoints import layouts
from tests.checkpoints.handmade import gguf_bytes, onnx_model
from tests.checkpoints.make import FLAT, save_sharded
from tests.checkpoints.test_layouts import values


def found(index: CheckpointIndex) -> list[tuple[str, str, str]]:
    """Return rule, severity and file name of each problem."""
    return [(problem.rule, problem.severity, Path(problem.file).name) for problem in index.problems]


def message(index: CheckpointIndex) -> str:
    return " | ".join(problem.message for problem in index.problems)


# Distributed checkpoints


def test_a_missing_shard(tmp_path: Path) -> None:
    layouts.split_dcp(tmp_path)
    (tmp_path / "__1_0.distcp").unlink()
    index = index_checkpoint(tmp_path)
    assert found(index) == [("missing-shard", "error", "__1_0.distcp")]
    assert index.problems[0].evidence == {"count": 1}
    entry = index.tensors[0]
    assert (len(entry.pieces), entry.missing, entry.unreadable) == (1, 12, None)


def test_a_short_shard(tmp_path: Path) -> None:
    layouts.split_dcp(tmp_path)
    os.truncate(tmp_path / "__1_0.distcp", 100)
    index = index_checkpoint(tmp_path)
    assert found(index) == [("truncated-file", "error", "__1_0.distcp")]
    assert index.problems[0].tensor == "w"


def test_a_save_without_metadata(tmp_path: Path) -> None:
    layouts.split_dcp(tmp_path)
    (tmp_path / ".metadata").unlink()
    index = index_checkpoint(tmp_path)
    assert found(index) == [("missing-shard", "error", ".metadata")]
    assert len(index.skipped) == 2


def test_a_shard_that_the_metadata_does_not_name(tmp_path: Path) -> None:
    layouts.split_dcp(tmp_path)
    (tmp_path / "__7_0.distcp").write_bytes(b"old")
    assert found(index_checkpoint(tmp_path)) == [("index-mismatch", "warning", "__7_0.distcp")]


def _shift(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks[1].offsets = torch.Size((2, 0))


def _drop(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks.pop()


def _beyond(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].size = torch.Size((5, 4))


def _retype(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].properties.dtype = torch.float16


def _reshape(metadata: Any) -> None:
    for chunk in metadata.state_dict_metadata["w"].chunks:
        chunk.sizes = torch.Size((3, 2))
    metadata.state_dict_metadata["w"].size = torch.Size((6, 2))


def _far(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.offset = 1 << 62


def _elsewhere(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.offset = 0


def _compressed(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["zstd"]


@pytest.mark.parametrize(
    ("change", "rule", "words"),
    [
        (_shift, "corrupt-file", "overlap"),
        (_drop, "corrupt-file", "hold 12 of its 24 elements"),
        (_beyond, "corrupt-file", "outside its shape"),
        (_retype, "shape-mismatch", "float16"),
        (_reshape, "shape-mismatch", "holds float32 [3, 4]"),
        (_far, "truncated-file", "lies up to byte"),
        (_elsewhere, "truncated-file", "lies up to byte"),
        (_compressed, "not-scanned", "extension"),
    ],
)
def test_metadata_that_lies(tmp_path: Path, change: Callable[[Any], None], rule: str, words: str) -> None:
    layouts.edit_metadata(layouts.split_dcp(tmp_path), change)
    if change is _elsewhere:
        rule, words = "corrupt-file", "no tensor at byte 0"
    index = index_checkpoint(tmp_path)
    assert rule in {problem.rule for problem in index.problems}
    assert words in message(index)
    assert {problem.tensor for problem in index.problems} == {"w"}


@pytest.mark.parametrize("name", ["../secret.distcp", "/etc/passwd", "a/../../secret", "C:\\x", "a\0b", ""])
def test_metadata_that_points_outside(tmp_path: Path, name: str) -> None:
    folder = layouts.split_dcp(tmp_path / "a")
    (tmp_path / "secret.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())

    def change(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = name

    layouts.edit_metadata(folder, change)
    index = index_checkpoint(folder)
    assert {problem.rule for problem in index.problems} == {"corrupt-file", "index-mismatch"}
    assert "outside the checkpoint" in message(index)
    assert not index.tensors[0].pieces


@pytest.mark.parametrize("data", [b"", b"\x80\x04N.", b"\x80\x04}.", b"garbage", bytes(100)])
def test_metadata_that_is_none(tmp_path: Path, data: bytes) -> None:
    layouts.split_dcp(tmp_path)
    (tmp_path / ".metadata").write_bytes(data)
    index = index_checkpoint(tmp_path)
    assert {problem.rule for problem in index.problems} <= {"corrupt-file", "truncated-file"}
    assert index.problems[0].file.endswith(".metadata")


# DeepSpeed


def test_a_missing_rank(tmp_path: Path) -> None:
    layouts.save_deepspeed(tmp_path, 1, world=3)
    (tmp_path / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    index = index_checkpoint(tmp_path)
    assert found(index) == [("missing-shard", "error", "zero_pp_rank_1_mp_rank_00_optim_states.pt")]
    expected = layouts.parameters()
    for entry in index.tensors:
        if entry.role == "weight":
            left = values(index, "weight")[entry.name].flatten()
            wanted = expected[entry.name].flatten()
            assert int((left == 77).sum()) == entry.missing
            assert torch.equal(left[left != 77], wanted[left != 77])
    assert sum(entry.missing for entry in index.tensors if entry.role == "weight") == 24


def test_a_missing_rank_of_stage_3(tmp_path: Path) -> None:
    layouts.save_deepspeed(tmp_path, 3, world=2)
    (tmp_path / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    index = index_checkpoint(tmp_path)
    assert ("missing-shard", "error", "zero_pp_rank_0_mp_rank_00_optim_states.pt") in found(index)
    entry = next(entry for entry in index.tensors if entry.role == "weight" and entry.name == "fc.weight")
    assert entry.missing == 10
    left = values(index, "weight")["fc.weight"].flatten()
    assert torch.equal(left[10:], layouts.parameters()["fc.weight"].flatten()[10:])


def test_missing_model_states(tmp_path: Path) -> None:
    layouts.save_deepspeed(tmp_path, 1)
    (tmp_path / "global_step2" / "mp_rank_00_model_states.pt").unlink()
    index = index_checkpoint(tmp_path)
    assert ("missing-shard", "error", "mp_rank_00_model_states.pt") in found(index)
    assert "cannot be told" in message(index)
    assert any(entry.name.endswith("single_partition_of_fp32_groups.0") for entry in index.tensors)


@pytest.mark.parametrize("text", ["global_step9", "../elsewhere", "", "a\0b", "x" * 5000])
def test_a_pointer_to_nothing(tmp_path: Path, text: str) -> None:
    layouts.save_deepspeed(tmp_path, 1)
    (tmp_path / "latest").write_text(text)
    index = index_checkpoint(tmp_path)
    rule = "missing-shard" if text in ("global_step9", "x" * 5000) else "corrupt-file"
    assert (rule, "error", "latest") in found(index)
    assert values(index, "weight")


def test_flat_buffers_of_the_wrong_size(tmp_path: Path) -> None:
    layouts.save_deepspeed(tmp_path, 3)
    path = tmp_path / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    model = tmp_path / "global_step2" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    saved = torch.load(model, weights_only=True)
    saved["param_shapes"] = [{"other.weight": torch.Size((50, 50))}]
    torch.save(saved, model)
    assert ("shape-mismatch", "error", path.name) in found(index_checkpoint(tmp_path))


def test_placeholders_without_the_files_that_hold_the_weights(tmp_path: Path) -> None:
    layouts.save_deepspeed(tmp_path, 3)
    for path in (tmp_path / "global_step2").glob("*_optim_states.pt"):
        path.unlink()
    index = index_checkpoint(tmp_path)
    assert found(index) == [("missing-shard", "error", "zero_pp_rank_0_mp_rank_00_optim_states.pt")]
    assert "only placeholders are left" in message(index)


def test_a_universal_save_without_weights(tmp_path: Path) -> None:
    layouts.save_universal(tmp_path)
    (tmp_path / "global_step2_universal" / "zero" / "fc.bias" / "fp32.pt").unlink()
    assert found(index_checkpoint(tmp_path)) == [("missing-shard", "error", "fp32.pt")]


# Megatron


def test_a_save_that_did_not_finish(tmp_path: Path) -> None:
    layouts.save_megatron(tmp_path)
    (tmp_path / "iter_0000005" / "metadata.json").unlink()
    assert found(index_checkpoint(tmp_path)) == [("missing-shard", "warning", "metadata.json")]


def test_an_iteration_that_is_not_there(tmp_path: Path) -> None:
    layouts.save_megatron(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    index = index_checkpoint(tmp_path)
    assert found(index) == [("missing-shard", "error", "latest_checkpointed_iteration.txt")]
    assert index.tensors


def test_a_missing_model_rank(tmp_path: Path) -> None:
    layouts.save_megatron_legacy(tmp_path, ranks=2)
    gone = tmp_path / "iter_0000005" / "mp_rank_01"
    (gone / "model_optim_rng.pt").unlink()
    gone.rmdir()
    assert found(index_checkpoint(tmp_path)) == [("missing-shard", "error", "mp_rank_01")]


# Shards and folders


def test_shards_without_an_index(tmp_path: Path) -> None:
    index_file = save_sharded(tmp_path, {name: torch.ones(3) for name in "abcdef"}, shards=3)
    index_file.unlink()
    index = index_checkpoint(tmp_path)
    assert (index.kind, index.problems, len(index.tensors)) == ("sharded", (), 6)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    index = index_checkpoint(tmp_path)
    assert found(index) == [("missing-shard", "error", "model-00002-of-00003.safetensors")]


def test_a_stray_shard_beside_the_index(tmp_path: Path) -> None:
    save_sharded(tmp_path, FLAT)
    save_file(FLAT, tmp_path / "model-00001-of-00009.safetensors")
    save_file(FLAT, tmp_path / "model.safetensors")
    assert sorted(found(index_checkpoint(tmp_path))) == [
        ("index-mismatch", "warning", "model-00001-of-00009.safetensors"),
        ("index-mismatch", "warning", "model.safetensors"),
    ]


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "truncated-file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "corrupt-file"),
        (b"<html></html>", "corrupt-file"),
        (bytes(5000), "corrupt-file"),
    ],
)
def test_a_file_that_is_none_beside_good_ones(tmp_path: Path, content: bytes, rule: str) -> None:
    torch.save(FLAT, tmp_path / "good.pt")
    (tmp_path / "optimizer.pt").write_bytes(content)
    index = index_checkpoint(tmp_path)
    assert found(index) == [(rule, "error", "optimizer.pt")]
    assert len(index.tensors) == 2


def test_links(tmp_path: Path) -> None:
    """A cache links to files elsewhere; a loop leads nowhere; a folder that links to its parent is not entered."""
    torch.save(FLAT, tmp_path / "blob")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.pt").symlink_to(tmp_path / "blob")
    (folder / "loop.pt").symlink_to(folder / "loop.pt")
    (folder / "up").symlink_to(folder)
    (folder / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    index = index_checkpoint(folder)
    assert len(index.tensors) == 2
    assert sorted(found(index)) == [
        ("missing-shard", "error", "gone.safetensors"),
        ("missing-shard", "error", "loop.pt"),
    ]
    assert "links back" in index.skipped[0].reason


def test_files_that_are_neither(tmp_path: Path) -> None:
    torch.save(FLAT, tmp_path / "model.pt")
    os.mkfifo(tmp_path / "pipe")
    index = index_checkpoint(tmp_path)
    assert [item.reason for item in index.skipped] == ["it is neither a file nor a folder"]


@pytest.mark.parametrize("names", [[], ["notes.txt"], ["config.json"]])
def test_folders_without_a_checkpoint(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).write_text("{}" if name.endswith("json") else "hello")
    (tmp_path / "inner").mkdir()
    with pytest.raises(UsageError, match="holds no checkpoint") as caught:
        index_checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(FLAT, tmp_path / "good.pt")
    torch.save(FLAT, tmp_path / "locked.pt")
    import builtins

    real = builtins.open

    def guarded(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).endswith("locked.pt"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr(builtins, "open", guarded)
    index = index_checkpoint(tmp_path)
    assert found(index) == [("not-scanned", "warning", "locked.pt")]
    with pytest.raises(UsageError, match="Permission denied"):
        index_checkpoint(tmp_path / "locked.pt")


def test_an_unreadable_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an index names and nobody may read is as good as missing; the rest is read."""
    save_sharded(tmp_path, FLAT)
    import builtins

    real = builtins.open

    def guarded(path: Any, *args: Any, **options: Any) -> Any:
        if "model-00002" in str(path):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.setattr(builtins, "open", guarded)
    index = index_checkpoint(tmp_path)
    assert found(index) == [("missing-shard", "error", "model-00002-of-00002.safetensors")]
    assert "Permission denied" in message(index)
    assert len(index.tensors) == 1


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(5000)}, tmp_path / "a.pt")
    index = index_checkpoint(tmp_path / "a.pt")
    extent = next(iter(index.storages.values())).extents[0]
    os.truncate(tmp_path / "a.pt", extent.offset + 100)
    with pytest.raises(Damage) as caught:
        list(stream_extent(extent))
    assert caught.value.problem.rule == "truncated-file"


def test_ranks_of_random_states(tmp_path: Path) -> None:
    layouts.save_accelerate(tmp_path)
    (tmp_path / "random_states_0.pkl").unlink()
    assert found(index_checkpoint(tmp_path)) == [("missing-shard", "warning", "random_states_0.pkl")]


def test_a_trainer_state_cut_short(tmp_path: Path) -> None:
    layouts.save_trainer(tmp_path)
    path = tmp_path / "trainer_state.json"
    path.write_text(path.read_text()[:40])
    assert found(index_checkpoint(tmp_path)) == [("truncated-file", "error", "trainer_state.json")]


def test_names_with_escape_codes(tmp_path: Path) -> None:
    torch.save({"\x1b[31m<b>": torch.ones(1)}, tmp_path / "\x1b[31m.pt")
    assert [entry.name for entry in index_checkpoint(tmp_path).tensors] == ["\x1b[31m<b>"]


# numpy


def test_npy_cut_short(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(100))
    os.truncate(tmp_path / "a.npy", 500)
    assert found(index_checkpoint(tmp_path / "a.npy")) == [("truncated-file", "error", "a.npy")]


@pytest.mark.parametrize(
    "header",
    [
        b"__import__('os').system('true')",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1 << 70,)}",
        b"{'descr': '<f4', 'fortran_order': False}",
        b"(" * 5000,
        b"{'descr': '<f4', 'fortran_order': False, 'shape': " + b"(" * 190 + b")" * 190 + b"}",
        b"\xff\xfe",
        b"[]",
    ],
)
def test_npy_headers_that_are_none(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + bytes(64))
    assert found(index_checkpoint(tmp_path / "a.npy")) == [("corrupt-file", "error", "a.npy")]


# GGUF


@pytest.mark.parametrize(
    ("content", "rule", "words"),
    [
        (gguf_bytes(shape=9), "truncated-file", "4 bytes after the end"),
        (gguf_bytes(shape=9, kind=2, data=64), "corrupt-file", "no whole blocks"),
        (gguf_bytes(offset=4, data=64), "corrupt-file", "not aligned"),
        (gguf_bytes(kind=99), "not-scanned", "ggml type 99"),
        (gguf_bytes(tensors=2), "corrupt-file", "overlaps"),
        (gguf_bytes(shape=1 << 62), "corrupt-file", "impossible"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0) + bytes(64), "corrupt-file", "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62) + bytes(64), "truncated-file", "claims"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 1 << 50),
            "corrupt-file",
            "array",
        ),
        (gguf_bytes()[:30], "truncated-file", "claims"),
    ],
)
def test_gguf_that_lies(tmp_path: Path, content: bytes, rule: str, words: str) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    index = index_checkpoint(tmp_path / "a.gguf")
    assert rule in {problem.rule for problem in index.problems}
    assert words in message(index)


def test_gguf_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(gguf_bytes())
    index = index_checkpoint(tmp_path / "a.gguf")
    assert index.problems == ()
    assert index.metadata == {str(tmp_path / "a.gguf"): {"key": "ab"}}


# ONNX


@pytest.mark.parametrize(
    ("location", "options", "rule", "words"),
    [
        ("../secret", {}, "corrupt-file", "outside"),
        ("/etc/passwd", {}, "corrupt-file", "outside"),
        ("gone.data", {}, "missing-shard", "missing"),
        ("w.data", {"offset": 8}, "truncated-file", "8 bytes after the end"),
        ("w.data", {"length": 12}, "corrupt-file", "declared with 12"),
        ("w.data", {}, None, ""),
    ],
)
def test_onnx_data_outside(
    tmp_path: Path, location: str, options: dict[str, int], rule: str | None, words: str
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret").write_bytes(bytes(16))
    (folder / "w.data").write_bytes(bytes(16))
    (folder / "a.onnx").write_bytes(onnx_model(location, **options))
    index = index_checkpoint(folder / "a.onnx")
    assert [problem.rule for problem in index.problems] == ([rule] if rule else [])
    assert words in message(index)
    assert bool(index.tensors[0].pieces) == (rule is None)


def test_onnx_that_is_none(tmp_path: Path) -> None:
    for content in (b"\x08\x09\x12\xff\xff\xff\xff\x0f", b"\x08\x09\x12\x01a", b"some text", bytes(40)):
        (tmp_path / "a.onnx").write_bytes(content)
        assert found(index_checkpoint(tmp_path / "a.onnx"))[0][0] in ("corrupt-file", "truncated-file")


# Archives


def test_a_member_that_leads_outside(tmp_path: Path) -> None:
    path = layouts.save_nemo(tmp_path / "a.nemo")
    data = bytearray(path.read_bytes())
    name = b"../../evil\0"
    head = data[:512]
    head[: len(name)] = name
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    data[:512] = head
    path.write_bytes(data)
    index = index_checkpoint(path)
    assert found(index) == [("corrupt-file", "error", "a.nemo")]
    assert len(index.tensors) == len(layouts.SHAPES)


@pytest.mark.parametrize("keep", [3000, 1500])
def test_an_archive_cut_short(tmp_path: Path, keep: int) -> None:
    path = layouts.save_nemo(tmp_path / "a.nemo")
    os.truncate(path, keep)
    assert "truncated-file" in {problem.rule for problem in index_checkpoint(path).problems} or keep == 1500


def test_compressed_archives_that_are_damaged(tmp_path: Path) -> None:
    path = layouts.save_nemo(tmp_path / "a.nemo", compressed=True)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert found(index_checkpoint(path)) == [("truncated-file", "error", "a.nemo")]
    path.write_bytes(gzip.compress(bytes(120 << 20)))
    index = index_checkpoint(path)
    assert found(index) == [("not-scanned", "warning", "a.nemo")]
    assert "limit" in message(index)


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    index = index_checkpoint(layouts.save_nemo(tmp_path / "a.nemo", compressed=True))
    assert values(index)
    assert len(os.listdir(tmp_path / "t")) == 1
    del index
    import gc

    gc.collect()
    assert os.listdir(tmp_path / "t") == []


def test_json_with_too_many_values(tmp_path: Path) -> None:
    text = b"[" + b"1," * 4_100_000 + b"1]"
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text) + 7) + b'{"a": ' + text + b"}")
    assert "more than" in message(index_checkpoint(tmp_path / "a.safetensors"))


def test_index_names_are_json(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    assert found(index_checkpoint(tmp_path)) == [("corrupt-file", "error", "model.safetensors.index.json")]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_file_that_stands_for_its_folder(tmp_path: Path, name: str) -> None:
    layouts.split_dcp(tmp_path)
    index = index_checkpoint(tmp_path / name)
    assert (index.kind, index.path, index.problems) == ("dcp", str(tmp_path), ())


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp"])
def test_a_pointer_in_the_place_of_a_part(tmp_path: Path, name: str) -> None:
    layouts.split_dcp(tmp_path)
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    index = index_checkpoint(tmp_path)
    assert found(index)[0] == ("corrupt-file", "error", name)
    assert "git lfs pull" in message(index)


def test_archives_of_other_things(tmp_path: Path) -> None:
    """An archive beside a checkpoint is no damaged checkpoint, unless it is called one."""
    import tarfile
    import zipfile

    torch.save(FLAT, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("a.txt", "text")
    with tarfile.open(tmp_path / "logs.tgz", "w:gz") as tar:
        tar.add(tmp_path / "data.zip", "a.zip.txt")
    (tmp_path / "table.csv.gz").write_bytes(gzip.compress(b"a,b"))
    (tmp_path / "words").write_bytes(b"\x80\x02 and so on")
    index = index_checkpoint(tmp_path)
    assert index.problems == ()
    assert len(index.skipped) == 4
    for name in ("data.zip", "table.csv.gz"):
        with pytest.raises(UsageError, match="no checkpoint"):
            index_checkpoint(tmp_path / name)
    (tmp_path / "data.zip").rename(tmp_path / "data.pt")
    assert found(index_checkpoint(tmp_path)) == [("corrupt-file", "error", "data.pt")]


@pytest.mark.parametrize("length", [0x7B20, 0x7B09, 0x20])
def test_a_header_whose_length_reads_like_a_text(tmp_path: Path, length: int) -> None:
    """0x7b20 is a space and a brace, as at the beginning of a JSON text."""
    header = json.dumps({"__metadata__": {"pad": ""}}).encode()
    if length > len(header):
        header = json.dumps({"__metadata__": {"pad": "x" * (length - len(header))}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    index = index_checkpoint(tmp_path / "a.safetensors")
    assert (index.kind, index.problems) == ("safetensors", ())
