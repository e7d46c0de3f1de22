"""What is wrong with a file is said exactly: as a record for the scan, as one line for whoever loads a model."""

from __future__ import annotations

import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nanprobe.checkpoints import CheckpointIndex, Problem, content_digest, index_checkpoint
from nanprobe.errors import UsageError
from nanprobe.inputs.weights import read_state_dict
from tests.checkpoints.make import FLAT, rezip, save_sharded, with_views


def only(index: CheckpointIndex) -> Problem:
    assert len(index.problems) == 1, index.problems
    return index.problems[0]


def line(path: Path, **options: Any) -> str:
    """Return the line that a user sees who loads the file into a model."""
    with pytest.raises(UsageError) as caught:
        read_state_dict(path, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert path.name in text or path.parent.name in text
    return text


def write_safetensors(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


# What is no checkpoint


def test_missing_path(tmp_path: Path) -> None:
    assert "does not exist" in line(tmp_path / "none.pt")


def test_foreign_content_under_a_foreign_name(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "no known checkpoint format" in line(tmp_path / "notes.txt")


def test_folder_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert "holds no checkpoint" in line(tmp_path)


def test_folder_with_several(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save(FLAT, tmp_path / name)
    assert "holds several checkpoints (a.pt, b.pt)" in line(tmp_path)


def test_folder_of_a_kind_without_a_reader(tmp_path: Path) -> None:
    (tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"x")
    assert "zero_to_fp32.py" in line(tmp_path)


def test_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    assert "neither a file nor a folder" in line(tmp_path / "pipe.pt")


def test_a_symlink_loop(tmp_path: Path) -> None:
    (tmp_path / "a.pt").symlink_to(tmp_path / "a.pt")
    assert "cannot be read" in line(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("content", "rule", "words"),
    [
        (b"", "truncated-file", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "corrupt-file", "git lfs pull"),
        (b"\n<!DOCTYPE html><html></html>", "corrupt-file", "web page"),
        (b'{"error": "not found"}', "corrupt-file", "JSON text"),
        (bytes(5000), "corrupt-file", "zero"),
        (b"some text", "corrupt-file", "no known checkpoint format"),
        (b"GGUF\3\0\0\0", "truncated-file", "its header claims"),
        (b"GGUF\1\0\0\0", "not-scanned", "GGUF of version 1"),
    ],
)
def test_what_stands_in_a_checkpoints_place(tmp_path: Path, content: bytes, rule: str, words: str) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(content)
    problem = only(index_checkpoint(path))
    assert problem.rule == rule
    assert problem.blocking
    assert words in problem.message
    assert words in line(path)


# safetensors


def test_safetensors_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(FLAT, path)
    os.truncate(path, path.stat().st_size - 8)
    index = index_checkpoint(path)
    assert {problem.rule for problem in index.problems} == {"truncated-file"}
    assert "8 bytes short" in line(path)
    readable = [entry for entry in index.tensors if entry.unreadable is None]
    assert len(index.tensors) == 2
    assert len(readable) == 1


def test_safetensors_cut_in_the_header(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(FLAT, path)
    os.truncate(path, 40)
    assert only(index_checkpoint(path)).rule == "truncated-file"
    assert "cut short" in line(path)
    os.truncate(path, 5)
    assert "needs at least 8 bytes" in line(path)


def test_safetensors_too_long(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(FLAT, path)
    with path.open("ab") as file:
        file.write(bytes(3))
    problem = only(index_checkpoint(path))
    assert (problem.rule, problem.blocking) == ("corrupt-file", False)
    assert "3 bytes at its end belong to no tensor" in problem.message
    assert set(read_state_dict(path)) == set(FLAT)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (bytes(8), "no JSON text"),
        (b"[1]", "no known"),
        (b'{"a": 1, "a": 2}', "'a' twice"),
        (b"{" * 50_000, "no JSON text"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "takes 8 bytes, but the header gives it 4"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "entry in the header is damaged"),
        ({"a": {"dtype": "F32", "shape": [1 << 62, 1 << 62], "data_offsets": [0, 8]}}, "but the header gives it 8"),
        ({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, "element type 'F99' is not known"),
        ({"a": 7}, "entry in the header is damaged"),
        (
            {
                "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
            },
            "'b' overlaps that of 'a'",
        ),
    ],
)
def test_safetensors_with_a_bad_header(tmp_path: Path, header: Any, words: str) -> None:
    name = "a.safetensors" if header != b"[1]" else "a.dat"
    assert words in line(write_safetensors(tmp_path / name, header, bytes(8)))


def test_safetensors_with_a_zero_or_impossible_header(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(FLAT, path)
    data = path.read_bytes()
    path.write_bytes(bytes(8) + data[8:])
    assert "first 8 bytes are zero" in line(path)
    path.write_bytes(b"\xff" * 8 + data[8:])
    assert "more than the format allows" in line(path)


def test_safetensors_with_a_gap(tmp_path: Path) -> None:
    path = write_safetensors(
        tmp_path / "a.safetensors", {"a": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}, bytes(6)
    )
    assert "2 bytes before 'a' belong to no tensor" in only(index_checkpoint(path)).message


# torch.save


@pytest.mark.parametrize("keep", [0.5, 0.9, 0.999])
def test_zip_cut_short(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(1000)}, path)
    os.truncate(path, int(path.stat().st_size * keep))
    assert only(index_checkpoint(path)).rule == "truncated-file"
    assert "without its directory" in line(path)


def test_legacy_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(FLAT, path, _use_new_zipfile_serialization=False)
    size = path.stat().st_size
    os.truncate(path, size - 4)
    index = index_checkpoint(path)
    assert {problem.rule for problem in index.problems} == {"truncated-file"}
    assert "4 bytes before the end of its storage" in line(path)
    assert sum(entry.unreadable is None for entry in index.tensors) == 1
    os.truncate(path, 200)
    assert only(index_checkpoint(path)).rule == "truncated-file"
    assert "ends in the middle" in line(path)


def test_legacy_with_another_count(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    data = bytearray(path.read_bytes())
    data[-20:-12] = struct.pack("<q", 4)
    path.write_bytes(data)
    assert "4 elements where 3 are declared" in line(path)


def change_member(source: Path, target: Path, name: str, change: Any, method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith(name):
                data = change(data)
            if data is not None:
                new.writestr(info.filename, data)


def test_storage_of_another_size(tmp_path: Path) -> None:
    torch.save(FLAT, tmp_path / "a.pt")
    change_member(tmp_path / "a.pt", tmp_path / "b.pt", "data/0", lambda data: data[:-4])
    assert "declared with 48 bytes, but the member 'a/data/0' holds 44" in line(tmp_path / "b.pt")


def test_storage_that_is_not_there(tmp_path: Path) -> None:
    torch.save(FLAT, tmp_path / "a.pt")
    change_member(tmp_path / "a.pt", tmp_path / "b.pt", "data/1", lambda data: None)
    index = index_checkpoint(tmp_path / "b.pt")
    assert only(index).tensor == "fc.bias"
    assert "no member 'a/data/1'" in line(tmp_path / "b.pt")


def test_forged_element_count(tmp_path: Path) -> None:
    """The object pickle claims a larger tensor than its storage holds."""
    torch.save({"a": torch.ones(1000)}, tmp_path / "a.pt")
    change_member(
        tmp_path / "a.pt", tmp_path / "b.pt", "data.pkl", lambda data: data.replace(b"K\0M\xe8\x03", b"K\0M\xe9\x03")
    )
    assert "reaches 4,004 bytes into a storage of 4,000 bytes" in line(tmp_path / "b.pt")


def flip(path: Path, needle: bytes) -> None:
    data = bytearray(path.read_bytes())
    at = data.rfind(needle)
    assert at > 0
    data[at] ^= 1
    path.write_bytes(data)


def test_flipped_byte_in_the_object_pickle(tmp_path: Path) -> None:
    torch.save(FLAT, tmp_path / "a.pt")
    flip(tmp_path / "a.pt", b"fc.weight")
    assert "does not match its CRC" in line(tmp_path / "a.pt")


def test_flipped_byte_in_a_compressed_storage(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(1000.0)}, tmp_path / "a.pt")
    rezip(tmp_path / "a.pt", tmp_path / "b.pt")
    with zipfile.ZipFile(tmp_path / "b.pt") as file:
        info = file.getinfo("a/data/0")
    data = bytearray((tmp_path / "b.pt").read_bytes())
    data[info.header_offset + 30 + len(info.filename) + info.compress_size // 2] ^= 0x10
    (tmp_path / "b.pt").write_bytes(data)
    text = line(tmp_path / "b.pt")
    assert "does not match its CRC" in text or "does not decompress" in text or "decompresses to" in text


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    previous = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save(FLAT, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(previous)
    assert not index_checkpoint(tmp_path / "a.pt").problems
    assert all(
        extent.crc32 is None
        for storage in index_checkpoint(tmp_path / "a.pt").storages.values()
        for extent in storage.extents
    )


def test_zip_that_is_no_checkpoint(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as file:
        file.writestr("readme.txt", "hello")
    assert "has no data.pkl" in line(tmp_path / "a.pt")


def test_unsupported_compression_is_named(tmp_path: Path) -> None:
    torch.save(FLAT, tmp_path / "a.pt")
    rezip(tmp_path / "a.pt", tmp_path / "b.pt", zipfile.ZIP_BZIP2)
    assert "method 12" in line(tmp_path / "b.pt")


def test_kinds_of_tensors_that_no_model_takes(tmp_path: Path) -> None:
    torch.save({"m": torch.empty(3, device="meta")}, tmp_path / "meta.pt")
    assert "without data (a meta tensor)" in line(tmp_path / "meta.pt")


# Shards


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_missing_shard_is_named(tmp_path: Path, suffix: str) -> None:
    index_file = save_sharded(tmp_path / "m", FLAT, suffix=suffix)
    shard = sorted(path for path in index_file.parent.iterdir() if path.name.endswith("of-00002" + suffix))[1]
    shard.unlink()
    problem = only(index_checkpoint(index_file))
    assert (problem.rule, problem.evidence["count"]) == ("missing-shard", 1)
    assert shard.name in line(index_file)


def edit(index_file: Path, change: Any) -> None:
    data = json.loads(index_file.read_text())
    change(data)
    index_file.write_text(json.dumps(data))


def test_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    index_file = save_sharded(tmp_path / "m", FLAT)
    edit(index_file, lambda data: data["weight_map"].update(ghost="model-00001-of-00002.safetensors"))
    problem = next(problem for problem in index_checkpoint(index_file).problems if problem.tensor == "ghost")
    assert (problem.rule, problem.severity) == ("index-mismatch", "error")
    assert "tensor 'ghost': the index says that model-00001-of-00002.safetensors holds it" in line(index_file)


def test_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    index_file = save_sharded(tmp_path / "m", {**FLAT, "third": torch.ones(1)})
    edit(index_file, lambda data: data["weight_map"].pop("third"))
    problems = index_checkpoint(index_file).problems
    assert {problem.rule for problem in problems} == {"index-mismatch"}
    assert not any(problem.blocking for problem in problems)
    assert set(read_state_dict(index_file)) == set(FLAT)


def test_total_size_is_compared(tmp_path: Path) -> None:
    index_file = save_sharded(tmp_path / "m", FLAT)
    assert index_checkpoint(index_file).problems == ()
    edit(index_file, lambda data: data["metadata"].update(total_size=1))
    assert "declares 1 bytes" in only(index_checkpoint(index_file)).message


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "/etc/passwd", "a/../../b", "C:\\x", "..\\x", "a//b", "", "a\0b"]
)
def test_a_name_that_leads_out_is_refused_unread(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(FLAT, tmp_path / "out.safetensors")
    index_file = save_sharded(tmp_path / "m", FLAT)
    edit(index_file, lambda data: data["weight_map"].update({"fc.bias": name}))
    problems = index_checkpoint(index_file).problems
    assert any(problem.rule == "corrupt-file" and "outside its folder" in problem.message for problem in problems)
    assert "outside its folder" in line(index_file)


@pytest.mark.parametrize(
    "text", ['{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map"']
)
def test_index_without_a_map(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    assert only(index_checkpoint(path)).rule == "corrupt-file"
    line(path)


def test_shard_that_is_something_else(tmp_path: Path) -> None:
    index_file = save_sharded(tmp_path / "m", FLAT)
    (tmp_path / "m" / "model-00002-of-00002.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in line(index_file)


# Records


def test_index_says_where_the_bytes_are(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(with_views(), path)
    index = index_checkpoint(path)
    entries = {entry.name: entry for entry in index.tensors}
    piece = entries["offset"].pieces[0]
    assert (piece.shape, piece.strides, piece.offset) == ((2, 3), (6, 1), 8)
    storage = index.storages[piece.storage]
    assert storage == index.storages[entries["tied"].pieces[0].storage]
    extent = storage.extents[0]
    data = path.read_bytes()[extent.offset : extent.offset + extent.length]
    assert data == torch.arange(24.0).numpy().tobytes()


def test_content_digest(tmp_path: Path) -> None:
    import hashlib

    save_file(FLAT, tmp_path / "model.safetensors")
    plain = "sha256:" + hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert content_digest(tmp_path / "model.safetensors") == content_digest(tmp_path) == plain
    index_file = save_sharded(tmp_path / "m", FLAT)
    before = content_digest(index_file)
    assert before == content_digest(index_file.parent)
    with (tmp_path / "m" / "model-00001-of-00002.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    assert content_digest(index_file) != before
    (tmp_path / "bundle").mkdir()
    for name in ("one.json", "two.json"):
        (tmp_path / "bundle" / name).write_text("{}")
    assert content_digest(tmp_path / "bundle").startswith("sha256:")
    with pytest.raises(UsageError, match="does not exist"):
        content_digest(tmp_path / "none")
