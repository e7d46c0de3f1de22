"""Every layout gives the same records: names, values bit by bit, roles, plain values, and what was left aside."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nanprobe.checkpoints import CheckpointIndex, index_checkpoint, read_storage
from nanprobe.checkpoints.records import TensorEntry
from nanprobe.errors import UsageError
from nanprobe.inputs.weights import read_state_dict
from tests.checkpoints import layouts
from tests.checkpoints.handmade import ARRAY, OBJECTS
from tests.checkpoints.make import FLAT, same, save_sharded


def value(index: CheckpointIndex, entry: TensorEntry) -> torch.Tensor:
    """Return the tensor that the pieces make up."""
    dtype = getattr(torch, entry.dtype)
    whole = torch.full(entry.shape, 77, dtype=dtype)
    for piece in entry.pieces:
        storage = index.storages[piece.storage]
        data = bytes(read_storage(storage))
        if storage.byteorder == "big":
            data = np.frombuffer(data, entry.dtype).byteswap().tobytes()
        flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
        view = torch.as_strided(flat, piece.shape, piece.strides, piece.offset)
        block = tuple(slice(at, at + size) for at, size in zip(piece.start, piece.shape, strict=True))
        whole[block] = view
    return whole


def values(index: CheckpointIndex, role: str | None = "any") -> dict[str, torch.Tensor]:
    return {entry.name: value(index, entry) for entry in index.tensors if role in ("any", entry.role) and entry.pieces}


def scalars(index: CheckpointIndex, role: str) -> dict[str, object]:
    return {scalar.name: scalar.value for scalar in index.scalars if scalar.role == role}


def test_distributed_checkpoint(tmp_path: Path) -> None:
    folder, expected = layouts.save_dcp_training(tmp_path / "step-5")
    index = index_checkpoint(folder)
    assert index.kind == "dcp"
    assert index.problems == ()
    found = values(index)
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in expected)
    entry = next(entry for entry in index.tensors if entry.name == "fc.weight.exp_avg_sq")
    assert (entry.role, entry.of, entry.key) == ("exp_avg_sq", "fc.weight", "optimizer.state.fc.weight.exp_avg_sq")
    assert scalars(index, "lr") == {"optimizer.param_groups.0.lr": 0.01}
    assert scalars(index, "step") == {"train_state.step": 5}


def test_weights_of_a_distributed_checkpoint(tmp_path: Path) -> None:
    """A model can be loaded from one, blocks put together; a part that is missing is refused."""
    folder, expected = layouts.save_dcp_training(tmp_path / "a")
    state = read_state_dict(folder)
    assert set(state) == {"emb.weight", "fc.weight", "fc.bias", "norm.weight", "norm.bias", "mask"}
    assert all(same(state[name], expected[name]) for name in state)
    layouts.split_dcp(tmp_path / "b")
    assert same(read_state_dict(tmp_path / "b")["w"], torch.arange(24.0).reshape(6, 4))
    (tmp_path / "b" / "__1_0.distcp").unlink()
    with pytest.raises(UsageError, match="missing"):
        read_state_dict(tmp_path / "b")


def test_distributed_checkpoint_in_safetensors(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter, SerializationFormat

    writer = FileSystemWriter(tmp_path / "a", serialization_format=SerializationFormat.SAFETENSORS)
    layouts.save_dcp(tmp_path / "a", dict(FLAT), storage_writer=writer)
    index = index_checkpoint(tmp_path / "a")
    assert index.problems == ()
    assert all(same(values(index)[name], FLAT[name]) for name in FLAT)


def test_distributed_checkpoint_in_files_of_each_process(tmp_path: Path) -> None:
    """What ``HuggingFaceStorageWriter`` leaves: the header says where the blocks of a file belong."""
    whole = torch.arange(12.0).reshape(4, 3)
    for number, part in enumerate(whole.split(2)):
        info = json.dumps({"w": {"saved_offsets": [2 * number, 0]}})
        name = f"shard-0000{number + 1}-model-00001-of-00001.safetensors"
        save_file({"w": part.clone()}, tmp_path / name, {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"})
    index = index_checkpoint(tmp_path)
    assert index.problems == ()
    assert same(values(index)["w"], whole)
    save_file({"w": whole[:1].clone()}, tmp_path / name, {"DCP_SHARDING_INFO": info.replace("2", "3")})
    index = index_checkpoint(tmp_path)
    assert [problem.rule for problem in index.problems] == ["corrupt-file"]
    assert index.tensors[0].missing == 3


def test_a_distributed_tensor_in_a_plain_file(tmp_path: Path) -> None:
    from nanprobe.checkpoints.inert import Foreign, Global, TensorValue
    from nanprobe.checkpoints.walk import walk

    local = TensorValue("float32", None, 0, (2, 3), (3, 1))
    mesh = TensorValue("int32", None, 0, (2,), (1,))
    state = (None, {"_local_tensor": local, "_spec": Foreign(Global("m", "Spec"), (mesh,))})
    node = Foreign(Global("torch.distributed.tensor", "DTensor"), (), state)
    assert [(found.name, found.value) for found in walk({"fc.weight": node}).tensors] == [("fc.weight", local)]


def test_tensors_in_a_plain_pickle(tmp_path: Path) -> None:
    tensors = {"a": ARRAY, "t": torch.arange(6.0).reshape(2, 3), "long": torch.randn(200, 200)}
    for protocol in range(6):
        (tmp_path / "a.pkl").write_bytes(pickle.dumps(tensors, protocol=protocol))
        index = index_checkpoint(tmp_path / "a.pkl")
        assert index.problems == ()
        found = values(index)
        assert same(found["t"], tensors["t"])
        assert same(found["long"], tensors["long"])


def test_blocks_of_several_files(tmp_path: Path) -> None:
    index = index_checkpoint(layouts.split_dcp(tmp_path, rows=3))
    assert index.problems == ()
    assert len(index.tensors[0].pieces) == 3
    assert same(values(index)["w"], torch.arange(36.0).reshape(9, 4))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_deepspeed(tmp_path: Path, stage: int, world: int) -> None:
    index = index_checkpoint(layouts.save_deepspeed(tmp_path, stage, world=world))
    assert index.kind == "deepspeed"
    assert index.problems == ()
    expected = layouts.parameters()
    masters, first, second = (values(index, role) for role in ("weight", "exp_avg", "exp_avg_sq"))
    for name, tensor in expected.items():
        assert same(masters[name], tensor)
        assert same(first[f"{name}.exp_avg"], tensor * 2)
        assert same(second[f"{name}.exp_avg_sq"], tensor.square() * 3)
    assert all(entry.missing == 0 for entry in index.tensors)
    low = [entry for entry in index.tensors if entry.dtype == "float16" and entry.name in expected]
    assert {entry.layout for entry in low} == ({"placeholder"} if stage == 3 else {"strided"})
    assert set(scalars(index, "loss-scale").values()) == {4096.0}
    assert "single_partition" in next(e for e in index.tensors if e.role == "weight").key or stage == 3
    reasons = {Path(item.file).name: item.reason for item in index.skipped}
    assert "not run" in reasons["zero_to_fp32.py"]


def test_deepspeed_without_slices(tmp_path: Path) -> None:
    """Older files do not note the slices; the order and the sizes of the parameters say the same."""
    index = index_checkpoint(layouts.save_deepspeed(tmp_path, 1, mappings=False))
    masters = values(index, "weight")
    assert all(same(masters[name], tensor) for name, tensor in layouts.parameters().items())


def test_deepspeed_parameters_that_are_not_trained(tmp_path: Path) -> None:
    layouts.save_deepspeed(tmp_path, 3)
    whole = torch.arange(15.0).reshape(5, 3)
    parts = [whole.flatten()[:8], torch.cat([whole.flatten()[8:], torch.zeros(1)])]
    for rank, part in enumerate(parts):
        path = tmp_path / "global_step2" / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        state = torch.load(path, weights_only=True)
        state["module"]["frozen.weight"] = torch.empty(0)
        state["frozen_param_shapes"] = {"frozen.weight": torch.Size((5, 3))}
        state["frozen_param_fragments"] = {"frozen.weight": part.clone()}
        torch.save(state, path)
    index = index_checkpoint(tmp_path)
    assert index.problems == ()
    entries = [entry for entry in index.tensors if entry.name == "frozen.weight" and entry.layout == "strided"]
    assert len(entries) == 1
    assert same(value(index, entries[0]), whole)


def test_deepspeed_tag_folder(tmp_path: Path) -> None:
    layouts.save_deepspeed(tmp_path, 2, fp16=False)
    index = index_checkpoint(tmp_path / "global_step2")
    assert index.kind == "deepspeed"
    assert index.problems == ()


def test_deepspeed_universal(tmp_path: Path) -> None:
    for path in (layouts.save_universal(tmp_path), tmp_path / "global_step2_universal"):
        index = index_checkpoint(path)
        assert index.kind == "deepspeed-universal"
        assert index.problems == ()
        masters, first = values(index, "weight"), values(index, "exp_avg")
        for name, tensor in layouts.parameters().items():
            assert same(masters[name], tensor)
            assert same(first[f"{name}.exp_avg"], tensor * 2)
        assert {entry.name for entry in index.tensors if entry.role == "step"} == {
            f"{name}.step" for name in layouts.SHAPES
        }


def test_megatron(tmp_path: Path) -> None:
    index = index_checkpoint(layouts.save_megatron(tmp_path))
    assert index.kind == "megatron"
    assert index.problems == ()
    roles = {(entry.name, entry.role) for entry in index.tensors}
    assert {("fc.weight", None), ("fc.weight", "weight"), ("fc.weight.exp_avg", "exp_avg")} <= roles
    assert ("optimizer.grad_scaler.scale", "loss-scale") in roles
    assert scalars(index, "training-args")["args.fp16"] is True
    assert scalars(index, "step") == {"iteration": 5}


def test_megatron_legacy(tmp_path: Path) -> None:
    index = index_checkpoint(layouts.save_megatron_legacy(tmp_path))
    assert index.kind == "megatron-legacy"
    assert index.problems == ()
    assert [(entry.name, entry.rank) for entry in index.tensors] == [
        ("language_model.embedding.word_embeddings.weight", 0),
        ("language_model.embedding.word_embeddings.weight", 1),
    ]


def test_trainer_folder(tmp_path: Path) -> None:
    index = index_checkpoint(layouts.save_trainer(tmp_path / "checkpoint-2"))
    assert index.kind == "hf-trainer"
    assert index.problems == ()
    assert {entry.role for entry in index.tensors} == {None, "step", "exp_avg", "exp_avg_sq", "rng"}
    assert scalars(index, "loss-scale") == {"scale": 65536.0}
    assert scalars(index, "lr") == {"param_groups.0.lr": 0.01, "param_groups.1.lr": 0.01}
    assert scalars(index, "config")["tie_word_embeddings"] is False
    losses = [scalar for scalar in index.scalars if scalar.name == "log_history.0.loss"]
    assert [(scalar.value, scalar.step, scalar.role) for scalar in losses] == [(1.25, 1, "log")]
    reasons = {Path(item.file).name: item.reason for item in index.skipped}
    assert reasons == {"README.md": "a text file", "tokenizer.json": "a tokenizer file"}


def test_trainer_log_with_nan(tmp_path: Path) -> None:
    log = [{"loss": 1.0, "step": 1}, {"loss": float("nan"), "grad_norm": float("inf"), "step": 2}]
    index = index_checkpoint(layouts.save_trainer(tmp_path, log=log))
    bad = {
        scalar.name: scalar.step
        for scalar in index.scalars
        if isinstance(scalar.value, float) and not math.isfinite(scalar.value)
    }
    assert bad == {"log_history.1.loss": 2, "log_history.1.grad_norm": 2}


def test_a_run_of_saves(tmp_path: Path) -> None:
    """Of several saves of a run the last is read; the others are told."""
    for step in (2, 10):
        layouts.save_trainer(tmp_path / f"checkpoint-{step}")
    index = index_checkpoint(tmp_path)
    assert {Path(entry.file).parent.name for entry in index.tensors} == {"checkpoint-10"}
    assert "earlier save than checkpoint-10" in next(
        item.reason for item in index.skipped if item.file.endswith("checkpoint-2")
    )


def test_trainer_with_deepspeed(tmp_path: Path) -> None:
    layouts.save_trainer(tmp_path)
    (tmp_path / "optimizer.pt").unlink()
    layouts.save_deepspeed(tmp_path, 2)
    index = index_checkpoint(tmp_path)
    assert index.kind == "hf-trainer"
    assert index.problems == ()
    assert values(index, "weight").keys() == layouts.SHAPES.keys()


def test_trainer_with_fsdp(tmp_path: Path) -> None:
    layouts.save_trainer(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    layouts.save_dcp(tmp_path / "pytorch_model_fsdp_0", {"model": layouts.parameters()})
    index = index_checkpoint(tmp_path)
    assert index.kind == "hf-trainer"
    assert set(layouts.SHAPES) <= {entry.name for entry in index.tensors}


def test_accelerate(tmp_path: Path) -> None:
    index = index_checkpoint(layouts.save_accelerate(tmp_path))
    assert index.kind == "accelerate"
    assert index.problems == ()
    states = [entry for entry in index.tensors if entry.name.endswith("numpy_random_seed.1")]
    assert [entry.role for entry in states] == ["rng", "rng"]
    assert value(index, states[0]).shape == (624,)


def test_lightning(tmp_path: Path) -> None:
    torch.save(layouts.lightning_state(), tmp_path / "a.ckpt")
    index = index_checkpoint(tmp_path / "a.ckpt")
    assert index.kind == "lightning"
    names = {entry.name: entry for entry in index.tensors}
    assert names["fc.weight"].key == "state_dict.fc.weight"
    assert names["fc.weight.exp_avg"].key == "optimizer_states.0.state.1.exp_avg"
    assert names["callbacks.ModelCheckpoint.kth_value"].role == "callback"
    assert scalars(index, "loss-scale") == {"MixedPrecision.scale": 0.5}
    assert scalars(index, "callback") == {"callbacks.ModelCheckpoint.best_model_score": math.inf}


@pytest.mark.parametrize("compressed", [False, True])
def test_nemo(tmp_path: Path, compressed: bool) -> None:
    index = index_checkpoint(layouts.save_nemo(tmp_path / "a.nemo", compressed=compressed))
    assert index.kind == "nemo"
    assert index.problems == ()
    found = values(index)
    assert all(same(found[name], tensor) for name, tensor in layouts.parameters().items())
    assert {entry.file for entry in index.tensors} == {str(tmp_path / "a.nemo")}


def test_two_sets_of_shards_and_parts_of_a_pipeline(tmp_path: Path) -> None:
    save_sharded(tmp_path / "unet", FLAT)
    torch.save(FLAT, tmp_path / "extra.pt")
    index = index_checkpoint(tmp_path)
    assert index.kind == "folder"
    assert index.problems == ()
    assert len(index.tensors) == 4


# Plain files


def check_arrays(index: CheckpointIndex) -> None:
    found = {entry.path[0]: value(index, entry) for entry in index.tensors}
    for name, array in OBJECTS.items():
        if isinstance(array, np.ndarray):
            assert np.array_equal(found[name].numpy(), array), name


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_in_a_pickle(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(OBJECTS, protocol=protocol))
    index = index_checkpoint(tmp_path / "a.pkl")
    assert index.kind == "pickle"
    assert index.problems == ()
    check_arrays(index)
    assert [scalar.name for scalar in index.scalars if scalar.value != scalar.value] == ["nan"]


@pytest.mark.parametrize("zipped", [True, False])
def test_arrays_in_a_torch_file(tmp_path: Path, zipped: bool) -> None:
    torch.save(OBJECTS, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    check_arrays(index_checkpoint(tmp_path / "a.pt"))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path: Path, save: object) -> None:
    arrays = {name: array for name, array in OBJECTS.items() if isinstance(array, np.ndarray)}
    save(tmp_path / "a.npz", **arrays)  # type: ignore[operator]  # either function of numpy
    index = index_checkpoint(tmp_path / "a.npz")
    assert index.kind == "npz"
    check_arrays(index)


def test_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", ARRAY)
    index = index_checkpoint(tmp_path / "a.npy")
    assert same(value(index, index.tensors[0]), torch.from_numpy(ARRAY))


def test_gguf(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from nanprobe.checkpoints.blocks import BLOCKS, block_scales, decode_blocks
    from nanprobe.checkpoints.gguf_file import _BLOCK_CODES

    kinds = gguf.constants.GGMLQuantizationType
    for code, name in _BLOCK_CODES.items():
        assert BLOCKS[name] == gguf.constants.GGML_QUANT_SIZES[kinds[name.upper()]], code
    data = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    data[1, 40] = np.nan
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"] * 50)
    writer.add_float32("x.eps", float("nan"))
    writer.add_tensor("plain", data)
    blocks = gguf.quants.quantize(np.nan_to_num(data), kinds.Q8_0)
    blocks[2, 34:36] = np.array([np.inf], np.float16).view(np.uint8)
    writer.add_tensor("blocks", blocks, raw_dtype=kinds.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    index = index_checkpoint(tmp_path / "a.gguf")
    assert index.problems == ()
    assert np.array_equal(value(index, index.tensors[0]).numpy(), data, equal_nan=True)
    entry = index.tensors[1]
    assert (entry.dtype, entry.shape, entry.layout) == ("q8_0", (4, 256), "blocks")
    raw = np.frombuffer(bytes(read_storage(index.storages[entry.pieces[0].storage])), np.uint8)
    decoded = decode_blocks(raw, "q8_0")
    assert np.flatnonzero(~np.isfinite(decoded).all(axis=1)).tolist() == [17]
    assert np.flatnonzero(~np.isfinite(block_scales(raw, "q8_0"))).tolist() == [17]
    assert [scalar.name for scalar in index.scalars if scalar.role == "config" and scalar.value != scalar.value] == [
        "x.eps"
    ]


def test_gguf_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    kinds = gguf.constants.GGMLQuantizationType
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("plain", np.ones((2, 32), np.float32))
    writer.add_tensor("blocks", gguf.quants.quantize(np.ones((2, 32), np.float32), kinds.Q4_0), raw_dtype=kinds.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr("nanprobe.checkpoints.blocks._DECODED", set())
    monkeypatch.setitem(__import__("sys").modules, "gguf.quants", None)
    index = index_checkpoint(tmp_path / "a.gguf")
    assert [entry.unreadable is None for entry in index.tensors] == [True, False]
    assert [problem.rule for problem in index.problems] == ["not-scanned"]
    assert "nanprobe[gguf]" in index.problems[0].message


def test_onnx(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper, numpy_helper

    tensors = [
        numpy_helper.from_array(ARRAY, "raw"),
        helper.make_tensor("typed", TensorProto.FLOAT, [2], [1.0, float("nan")]),
        helper.make_tensor("half", TensorProto.FLOAT16, [2], [1.5, float("inf")]),
        helper.make_tensor("long", TensorProto.INT64, [2], [-1, 5]),
        helper.make_tensor("double", TensorProto.DOUBLE, [1], [2.0]),
    ]
    constant = helper.make_node("Constant", [], ["constant"], value=numpy_helper.from_array(ARRAY[0], ""))
    model = helper.make_model(helper.make_graph([constant], "g", [], [], initializer=tensors))
    onnx.save(model, tmp_path / "a.onnx")
    (tmp_path / "outside").mkdir()
    onnx.save(model, tmp_path / "outside" / "b.onnx", save_as_external_data=True, location="b.data", size_threshold=0)
    for path in (tmp_path / "a.onnx", tmp_path / "outside" / "b.onnx", tmp_path / "outside"):
        index = index_checkpoint(path)
        assert index.kind == "onnx"
        assert index.problems == ()
        assert index.skipped == ()
        found = values(index)
        assert same(found["raw"], torch.from_numpy(ARRAY))
        assert same(found["constant"], torch.from_numpy(ARRAY[0]))
        assert found["typed"].isnan().tolist() == [False, True]
        assert found["half"].tolist() == [1.5, math.inf]
        assert found["long"].tolist() == [-1, 5]
        assert found["double"].tolist() == [2.0]


def test_json_of_no_state(tmp_path: Path) -> None:
    layouts.save_trainer(tmp_path)
    (tmp_path / "trainer_state.json").write_text(json.dumps([1, 2]))
    assert index_checkpoint(tmp_path).problems == ()
