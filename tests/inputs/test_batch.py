"""Reading batches: every file type and shape, bundles, keys, and what is no batch."""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nanprobe.config import BatchSpec
from nanprobe.errors import UsageError
from nanprobe.inputs.batch import LoadedBatch, load_batch
from nanprobe.inputs.rng import RandomState, seed_all

IDS = torch.arange(6).reshape(2, 3)


@dataclasses.dataclass
class Custom:
    """A batch type of the user's own, which no safe unpickler knows."""

    ids: torch.Tensor


class Runs:
    """A pickle that would run code when it is loaded."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("was_run"),))


def load(path: Path, key: str | None = None, **kwargs: Any) -> LoadedBatch:
    return load_batch(BatchSpec(path=path, key=key), **kwargs)


def error_of(path: Path, key: str | None = None, **kwargs: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load(path, key, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        IDS,
        (IDS, IDS.float()),
        [IDS, {"mask": IDS > 2}],
        {"input_ids": IDS, "labels": None, "text": ["a", "b"], "scale": 0.5},
        OrderedDict(x=IDS),
        {},
        [],
    ],
)
def test_what_torch_save_wrote(tmp_path: Path, value: Any, legacy: bool) -> None:
    path = tmp_path / "bad.pt"
    torch.save(value, path, _use_new_zipfile_serialization=not legacy)
    loaded = load(path)
    assert loaded.bundle is None
    assert type(loaded.value) is type(value)
    assert str(loaded.value) == str(value)


def test_the_name_of_the_file_does_not_matter(tmp_path: Path) -> None:
    torch.save({"x": IDS}, tmp_path / "batch")
    assert torch.equal(load(tmp_path / "batch").value["x"], IDS)
    save_file({"x": IDS}, tmp_path / "other.bin")
    assert torch.equal(load(tmp_path / "other.bin").value["x"], IDS)
    np.savez(tmp_path / "arrays.npz", x=IDS.numpy())
    (tmp_path / "arrays.npz").rename(tmp_path / "arrays.dat")
    assert torch.equal(load(tmp_path / "arrays.dat").value["x"], IDS)


def test_safetensors_keep_every_dtype(tmp_path: Path) -> None:
    saved = {"a": IDS.bfloat16(), "b": IDS.half(), "c": IDS > 1}
    save_file(saved, tmp_path / "bad.safetensors")
    loaded = load(tmp_path / "bad.safetensors").value
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {k: v.dtype for k, v in saved.items()}


def test_npz_by_name_and_by_position(tmp_path: Path) -> None:
    np.savez(tmp_path / "named.npz", x=np.ones((2, 2), np.float32), y=np.array(3, ">i4"))
    named = load(tmp_path / "named.npz").value
    assert named["x"].dtype == torch.float32
    assert named["y"] == 3
    np.savez_compressed(tmp_path / "positional.npz", np.zeros(2), np.ones(3))
    positional = load(tmp_path / "positional.npz").value
    assert isinstance(positional, tuple)
    assert [tensor.shape[0] for tensor in positional] == [2, 3]


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("nope", ["no key `nope`", "there are `data`, `dotted.key`"]),
        ("dta", ["did you mean `data`?"]),
        ("data.2", ["no position `2` in `data`", "2 entries"]),
        ("data.x", ["no position `x`"]),
        ("data.0.x.y", ["no key `y` in `data.0.x`", "holds a Tensor"]),
    ],
)
def test_a_key_that_is_not_there(tmp_path: Path, key: str, parts: list[str]) -> None:
    path = tmp_path / "bad.pt"
    torch.save({"data": [{"x": IDS}, 1], "dotted.key": IDS}, path)
    assert torch.equal(load(path, "data.0.x").value, IDS)
    assert torch.equal(load(path, "dotted.key").value, IDS)
    message = error_of(path, key)
    for part in parts:
        assert part in message


def test_a_class_is_refused_and_named_unless_trusted(tmp_path: Path) -> None:
    path = tmp_path / "bad.pt"
    torch.save(Custom(IDS), path)
    message = error_of(path)
    assert f"{Custom.__module__}.Custom" in message
    assert "--trust-pickle" in message
    assert torch.equal(load(path, trust_pickle=True).value.ids, IDS)


def test_nothing_in_a_batch_runs_without_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.pt"
    torch.save({"x": Runs()}, path)
    message = error_of(path)
    assert "--trust-pickle" in message
    assert "pathlib.Path" in message
    assert not (tmp_path / "was_run").exists()
    load(path, trust_pickle=True)
    assert (tmp_path / "was_run").exists()


def test_a_pickle_protocol_that_the_safe_reader_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "bad.pt"
    torch.save({"x": IDS}, path, pickle_protocol=5)
    assert "pickle protocol" in error_of(path)
    assert torch.equal(load(path, trust_pickle=True).value["x"], IDS)


def test_a_pickle_that_torch_save_did_not_write(tmp_path: Path) -> None:
    path = tmp_path / "bad.pkl"
    path.write_bytes(pickle.dumps({"x": 1}))
    assert "was not written by torch.save" in error_of(path)
    assert "was not written by torch.save" in error_of(path, trust_pickle=True)


def test_a_class_of_the_configs_folder_is_found_with_trust(tmp_path: Path) -> None:
    import sys

    (tmp_path / "batch_types.py").write_text("class Batch:\n    pass\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import batch_types  # type: ignore[import-not-found]  # written by this test

        torch.save(batch_types.Batch(), tmp_path / "bad.pt")
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["batch_types"]
    assert type(load(tmp_path / "bad.pt", trust_pickle=True, folder=tmp_path).value).__name__ == "Batch"
    (tmp_path / "batch_types.py").unlink()
    sys.modules.pop("batch_types")
    assert "cannot be imported" in error_of(tmp_path / "bad.pt", trust_pickle=True, folder=tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("bad.pt", b"", "is empty"),
        ("bad.pt", b"\0" * 5000, "zeros only"),
        ("bad.pt", b"<!DOCTYPE html><html>", "web page"),
        ("bad.pt", b"\n\n<html lang=en>", "web page"),
        ("bad.pt", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git LFS pointer"),
        ("bad.pt", b"hello", "no known format"),
        ("bad.npz", b"hello", "no known format"),
        ("bad.safetensors", b"hello", "no readable .safetensors file"),
        ("bad.safetensors", b"\x10\0\0\0\0\0\0\0{", "no readable .safetensors file"),
        ("bad.pt", b"\x80\x02garbage", "truncated or damaged"),
        ("bad.pt", b"PK\x03\x04garbage", "truncated or damaged"),
        ("bad.npz", b"PK\x03\x04garbage", "truncated or damaged"),
    ],
)
def test_what_is_no_batch(tmp_path: Path, name: str, content: bytes, part: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert part in error_of(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert "no such file" in error_of(tmp_path / "none.pt")
    assert "is a folder" in error_of(tmp_path)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("kind", ["pt", "legacy", "npz", "safetensors"])
def test_a_truncated_file(tmp_path: Path, kind: str, share: float) -> None:
    path = tmp_path / f"bad.{kind}"
    value = {"x": torch.arange(4000.0)}
    if kind == "npz":
        np.savez(path, x=value["x"].numpy())
    elif kind == "safetensors":
        save_file(value, path)
    else:
        torch.save(value, path, _use_new_zipfile_serialization=kind == "pt")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    assert "truncated or damaged" in error_of(path) or "no readable" in error_of(path)


def test_npz_with_objects_or_text(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", fine=np.ones(1), odd=np.array([{}], dtype=object))
    assert "`odd` holds Python objects" in error_of(tmp_path / "objects.npz")
    np.savez(tmp_path / "text.npz", words=np.array(["a"]))
    assert "`words` has the type <U1" in error_of(tmp_path / "text.npz")


def test_a_zip_that_is_neither(tmp_path: Path) -> None:
    path = tmp_path / "photos.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    assert "truncated or damaged" in error_of(path)


def bundle() -> dict[str, Any]:
    seed_all(5)
    return {
        "nanprobe_bundle": 1,
        "batch": {"x": IDS},
        "rng": RandomState.capture().to_bundle(),
        "amp": {"mode": "autocast", "dtype": "fp16", "loss_scale": 1024.0},
        "step": 17,
        "history": [{"loss": 1.0}],
        "reason": "loss is nan",
    }


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_bundle(tmp_path: Path, as_folder: bool) -> None:
    path = tmp_path / "bundle.pt"
    torch.save(bundle(), path)
    expected = (random.random(), float(np.random.rand()), float(torch.rand(1)))
    loaded = load(tmp_path if as_folder else path)
    assert torch.equal(loaded.value["x"], IDS)
    assert loaded.bundle is not None
    assert loaded.bundle.amp["loss_scale"] == 1024.0
    assert (loaded.bundle.step, loaded.bundle.reason) == (17, "loss is nan")
    assert loaded.bundle.rng is not None
    loaded.bundle.rng.restore()
    assert (random.random(), float(np.random.rand()), float(torch.rand(1))) == expected
    assert torch.equal(load(path, "x").value, IDS)


def test_a_bundle_needs_only_its_batch(tmp_path: Path) -> None:
    torch.save({"nanprobe_bundle": 1, "batch": IDS}, tmp_path / "b.pt")
    loaded = load(tmp_path)
    assert torch.equal(loaded.value, IDS)
    assert loaded.bundle is not None
    assert loaded.bundle.rng is None


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"nanprobe_bundle": 2}, "version 2"),
        ({"batch": None}, None),
        ({"rng": [1]}, "`rng` is a list"),
        ({"amp": 3}, "`amp` is a int"),
        ({"rng": {"torch": torch.zeros(3)}}, "`rng.torch` is damaged"),
        ({"rng": {"python": [3, [1, 2], None]}}, "`rng.python` is damaged"),
        ({"rng": {"numpy": ["MT19937", torch.zeros(3), 0, 0, 0.0]}}, "`rng.numpy` is damaged"),
    ],
)
def test_a_damaged_bundle(tmp_path: Path, change: dict[str, Any], part: str | None) -> None:
    path = tmp_path / "bundle.pt"
    value = {**bundle(), **change}
    if part is None:
        del value["batch"]
        part = "without a `batch`"
    torch.save(value, path)
    assert part in error_of(path)


def test_a_pipe_is_no_batch(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "batch.pt")
    with pytest.raises(UsageError, match=r"batch\.pt: a pipe, where a file is expected"):
        load(tmp_path / "batch.pt")
    with pytest.raises(UsageError, match="a device, where a file is expected"):
        load(Path("/dev/zero"))


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        load(tmp_path / ("x" * 5000))
    with pytest.raises(UsageError, match="without a NUL character"):
        load(tmp_path / "a\0b.pt")


def test_tensors_on_the_meta_device_hold_nothing(tmp_path: Path) -> None:
    torch.save({"ids": torch.ones(2), "mask": torch.empty(2, device="meta")}, tmp_path / "batch.pt")
    with pytest.raises(UsageError, match="`mask` is on the meta device and holds no values"):
        load(tmp_path / "batch.pt")


@pytest.mark.parametrize("version", [torch.ones(3), torch.tensor(1), True, "1", 2, 10**300], ids=range(6))
def test_a_bundle_of_a_strange_version(tmp_path: Path, version: Any) -> None:
    torch.save({"nanprobe_bundle": version, "batch": IDS}, tmp_path / "batch.pt")
    with pytest.raises(UsageError, match=r"is a bundle of version .*reads version 1"):
        load(tmp_path / "batch.pt")


@pytest.mark.parametrize(("dim", "fits"), [(0, True), (1, True), (2, False), (99, False), (-1, True), (-2, False)])
def test_the_batch_dimension_is_there(tmp_path: Path, dim: int, fits: bool) -> None:
    torch.save((IDS, torch.ones(2)), tmp_path / "batch.pt")
    spec = BatchSpec(path=tmp_path / "batch.pt", dim=dim)
    if fits:
        load_batch(spec)
    else:
        with pytest.raises(UsageError, match=f"`dim: {dim}` is beyond its tensors"):
            load_batch(spec)
