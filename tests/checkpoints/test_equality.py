"""What the readers give equals what the libraries that wrote the files give, bit for bit."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanprobe.inputs.weights import read_state_dict
from tests.checkpoints.make import every_dtype, rezip, safetensors_dtypes, same, save_sharded, with_views


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert same(found[name], tensor), name
        assert found[name].stride() == tensor.stride(), name


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", range(6))
def test_torch_save(tmp_path: Path, protocol: int, zipped: bool) -> None:
    tensors = {**every_dtype(), **with_views()}
    path = tmp_path / "a.pt"
    torch.save(tensors, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert_equal(read_state_dict(path), tensors)


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_load_agrees(tmp_path: Path, zipped: bool) -> None:
    # torch.load cannot read the types without a storage class of their own back from its older format.
    tensors = {**(every_dtype() if zipped else {}), **with_views()}
    path = tmp_path / "a.pt"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    assert_equal(read_state_dict(path), torch.load(path, weights_only=True))


@pytest.mark.parametrize("zipped", [True, False])
def test_shared_storages_stay_shared(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "a.pt"
    torch.save(with_views(), path, _use_new_zipfile_serialization=zipped)
    found = read_state_dict(path)
    assert found["first"].data_ptr() == found["tied"].data_ptr()
    assert found["transposed"].untyped_storage().data_ptr() == found["first"].untyped_storage().data_ptr()
    found["first"][0, 0] = 99
    assert found["tied"][0, 0] == 99
    assert found["expanded"].untyped_storage().data_ptr() != found["first"].untyped_storage().data_ptr()


def test_deflated_zip(tmp_path: Path) -> None:
    tensors = {**every_dtype(), **with_views()}
    torch.save(tensors, tmp_path / "a.pt")
    rezip(tmp_path / "a.pt", tmp_path / "b.pt")
    found = read_state_dict(tmp_path / "b.pt")
    assert_equal(found, tensors)
    assert not found.mapped


def test_stored_zip_of_another_tool(tmp_path: Path) -> None:
    """Members that another tool stored without torch's alignment; those that are not aligned are read."""
    tensors = every_dtype()
    torch.save(tensors, tmp_path / "a.pt")
    rezip(tmp_path / "a.pt", tmp_path / "b.pt", zipfile.ZIP_STORED)
    assert_equal(read_state_dict(tmp_path / "b.pt"), tensors)


def test_big_endian_zip(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 2.0, -3.0])
    torch.save({"a": values}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if info.filename.endswith("byteorder"):
                data = b"big"
            elif "/data/" in info.filename:
                data = values.numpy().astype(">f4").tobytes()
            new.writestr(info.filename, data)
    assert_equal(read_state_dict(tmp_path / "b.pt"), {"a": values})


def test_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file(safetensors_dtypes(), path)
    found = read_state_dict(path)
    wanted = load_file(path)
    assert set(found) == set(wanted)
    assert_equal({name: found[name] for name in wanted}, wanted)


@pytest.mark.parametrize("name", ["a.pt", "a.bin", "a.weights", "a"])
def test_content_decides_and_not_the_suffix(tmp_path: Path, name: str) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / name)
    assert_equal(read_state_dict(tmp_path / name), {"a": torch.ones(2)})
    torch.save({"a": torch.zeros(2)}, tmp_path / name)
    assert_equal(read_state_dict(tmp_path / name), {"a": torch.zeros(2)})


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("folder", [True, False])
def test_shards(tmp_path: Path, suffix: str, folder: bool) -> None:
    tensors = safetensors_dtypes()
    index = save_sharded(tmp_path / "m", tensors, suffix=suffix, shards=3)
    found = read_state_dict(index.parent if folder else index)
    assert set(found) == set(tensors)
    assert_equal({name: found[name] for name in tensors}, tensors)


def test_mappings_are_private_and_independent(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    before = path.read_bytes()
    first, second = read_state_dict(path), read_state_dict(path)
    assert sum(first.mapped.values()) == 4000
    first["a"].fill_(7)
    assert torch.equal(second["a"], torch.ones(1000))
    assert torch.equal(read_state_dict(path)["a"], torch.ones(1000))
    assert path.read_bytes() == before


def test_a_read_only_file_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(10)}, path)
    path.chmod(0o444)
    found = read_state_dict(path)
    found["a"].add_(1)
    assert found.mapped
