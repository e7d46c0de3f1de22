"""Loading a checkpoint into a model: what is found, what stays mapped, what stays tied, what is refused."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nanprobe.errors import UsageError
from nanprobe.inputs.weights import LoadResult, load_into, read_state_dict
from tests.checkpoints.make import same, save_sharded


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        if tie:
            self.head.weight = self.embed.weight


class Mixed(nn.Module):
    """Frozen parameters, buffers of both kinds, batch norm, a recurrent part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.lstm = nn.LSTM(4, 3)
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("transient", torch.full((2,), 5.0), persistent=False)


def save(model: nn.Module, path: Path) -> Path:
    torch.save(model.state_dict(), path)
    return path


def filled(model: nn.Module, seed: int = 1) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return model


def test_everything_is_loaded_and_mapped(tmp_path: Path) -> None:
    source = filled(Mixed())
    path = save(source, tmp_path / "a.pt")
    model = Mixed()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    result = load_into(model, read_state_dict(path))
    assert result.missing == result.unexpected == ()
    for (name, wanted), found in zip(source.state_dict().items(), model.state_dict().values(), strict=True):
        assert same(found, wanted), name
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert not model.frozen.requires_grad
    assert model.lstm.weight_ih_l0.requires_grad
    assert torch.equal(model.transient, torch.full((2,), 5.0))
    assert result.mapped_bytes == sum(t.numel() * t.element_size() for t in source.state_dict().values())
    value = torch.ones(2, 1, 4)
    assert torch.equal(model.lstm(value)[0], source.lstm(value)[0])


def test_two_loads_share_nothing_writable(tmp_path: Path) -> None:
    path = save(filled(Mixed()), tmp_path / "a.pt")
    bytes_before = path.read_bytes()
    first, second = Mixed(), Mixed()
    load_into(first, read_state_dict(path))
    load_into(second, read_state_dict(path))
    with torch.no_grad():
        first.lstm.weight_ih_l0.zero_()
    assert second.lstm.weight_ih_l0.abs().sum() > 0
    assert path.read_bytes() == bytes_before


def test_half_weights_become_the_models_type(tmp_path: Path) -> None:
    source = filled(Tied())
    save_file({"embed.weight": source.embed.weight.detach().to(torch.bfloat16)}, tmp_path / "a.safetensors")
    model = Tied()
    result = load_into(model, read_state_dict(tmp_path / "a.safetensors"))
    assert model.embed.weight.dtype == torch.float32
    assert torch.equal(model.embed.weight, source.embed.weight.to(torch.bfloat16).float())
    assert result.converted == 1
    assert result.mapped_bytes == 0
    assert any("bfloat16 to float32" in note for note in result.notes)


def test_a_missing_tied_key_is_fine(tmp_path: Path) -> None:
    source = filled(Tied())
    save_file({"embed.weight": source.embed.weight.detach()}, tmp_path / "a.safetensors")
    model = Tied()
    result = load_into(model, read_state_dict(tmp_path / "a.safetensors"))
    assert result.missing == ()
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, source.embed.weight)
    with pytest.raises(UsageError, match=r"lacks 1 of 2 keys of the model: head\.weight"):
        load_into(Tied(tie=False), read_state_dict(tmp_path / "a.safetensors"))


def test_tied_weights_that_differ_are_told(tmp_path: Path) -> None:
    path = save(filled(Tied(tie=False)), tmp_path / "a.pt")
    model, plain = Tied(), Tied()
    result = load_into(model, read_state_dict(path))
    plain.load_state_dict(torch.load(path, weights_only=True))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, plain.embed.weight)
    assert any("embed.weight and head.weight are one weight in the model" in note for note in result.notes)


def test_weights_that_share_memory_in_the_file_alone_become_independent(tmp_path: Path) -> None:
    path = save(filled(Tied()), tmp_path / "a.pt")
    model = Tied(tie=False)
    load_into(model, read_state_dict(path))
    with torch.no_grad():
        model.head.weight.zero_()
    assert model.embed.weight.abs().sum() > 0


def test_views_of_one_memory_in_the_model_stay_so(tmp_path: Path) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat = torch.zeros(6)
            self.a = nn.Parameter(self.flat[:2])
            self.b = nn.Parameter(self.flat[2:])

    save_file({"a": torch.ones(2), "b": torch.full((4,), 2.0)}, tmp_path / "a.safetensors")
    model = Flat()
    load_into(model, read_state_dict(tmp_path / "a.safetensors"))
    assert model.flat.tolist() == [1, 1, 2, 2, 2, 2]


def test_memory_layout_is_the_models(tmp_path: Path) -> None:
    torch.save({"weight": torch.arange(12.0).reshape(4, 3).t(), "bias": torch.zeros(()).expand(3)}, tmp_path / "a.pt")
    model = nn.Linear(4, 3)
    load_into(model, read_state_dict(tmp_path / "a.pt"))
    assert model.weight.is_contiguous()
    assert model.bias.is_contiguous()
    assert torch.equal(model.weight, torch.arange(12.0).reshape(4, 3).t())


def test_meta_model_gets_its_weights(tmp_path: Path) -> None:
    source = filled(Tied())
    path = save(source, tmp_path / "a.pt")
    with torch.device("meta"):
        model = Tied()
    load_into(model, read_state_dict(path))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, source.head.weight)


def test_lazy_modules_take_the_shape_of_the_file(tmp_path: Path) -> None:
    path = save(nn.Linear(5, 3), tmp_path / "a.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.LazyLinear(3)
    load_into(model, read_state_dict(path))
    assert torch.equal(model.weight, torch.load(path, weights_only=True)["weight"])


def test_versions_of_modules_are_kept(tmp_path: Path) -> None:
    """A batch norm saved before it counted batches (version 1) loads without that count."""
    state = OrderedDict((k, v) for k, v in nn.BatchNorm1d(2).state_dict().items() if k != "num_batches_tracked")
    state._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]  # as torch does
    torch.save(state, tmp_path / "old.pt")
    assert load_into(nn.BatchNorm1d(2), read_state_dict(tmp_path / "old.pt")).missing == ()
    state._metadata[""]["version"] = 2  # type: ignore[attr-defined]  # as torch does
    torch.save(state, tmp_path / "recent.pt")
    with pytest.raises(UsageError, match="num_batches_tracked"):
        load_into(nn.BatchNorm1d(2), read_state_dict(tmp_path / "recent.pt"))


def test_whole_module_without_running_it(tmp_path: Path) -> None:
    source = filled(Mixed())
    torch.save(source, tmp_path / "whole.pt")
    model = Mixed()
    result = load_into(model, read_state_dict(tmp_path / "whole.pt"))
    assert result.unexpected == ()
    assert torch.equal(model.norm.running_mean, source.norm.running_mean)


@pytest.mark.parametrize(
    ("wrap", "key"),
    [
        (lambda state: {"state_dict": state, "epoch": 3, "optimizer": {"m": torch.ones(2)}}, "state_dict"),
        (lambda state: {"model": state, "optimizer": {0: {"m": torch.ones(2)}}, "step": torch.tensor(1)}, "model"),
        (lambda state: {"model": {"state_dict": state}}, "model.state_dict"),
        (lambda state: {"my_net": state, "optimizer": {"m": torch.ones(2)}}, "my_net"),
        (lambda state: state, ""),
    ],
)
def test_usual_wrappers_are_found_and_told(tmp_path: Path, wrap: Any, key: str) -> None:
    source = filled(Tied())
    torch.save(wrap(source.state_dict()), tmp_path / "a.pt")
    result = load_into(Tied(), read_state_dict(tmp_path / "a.pt"))
    assert result.key == key
    assert any(f"`{key}`" in note for note in result.notes) == bool(key)


def test_a_given_key(tmp_path: Path) -> None:
    torch.save({"a": {"b.c": {"x": torch.ones(1)}}, "d": [{"x": torch.zeros(1)}]}, tmp_path / "a.pt")
    assert read_state_dict(tmp_path / "a.pt", key="a.b.c")["x"].item() == 1
    assert read_state_dict(tmp_path / "a.pt", key="d.0")["x"].item() == 0
    assert set(read_state_dict(tmp_path / "a.pt", key="")) == {"a.b.c.x", "d.0.x"}
    with pytest.raises(UsageError, match=r"no tensors under the key 'a\.b\.d': did you mean `a\.b\.c`"):
        read_state_dict(tmp_path / "a.pt", key="a.b.d")


def test_strip_prefix(tmp_path: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in nn.Linear(2, 2).state_dict().items()}
    torch.save(state, tmp_path / "a.pt")
    for prefix in ("module.", "module"):
        assert load_into(nn.Linear(2, 2), read_state_dict(tmp_path / "a.pt", strip_prefix=prefix)) == LoadResult(
            mapped_bytes=24
        )
    with pytest.raises(UsageError, match=r"strip_prefix: module\.` 2 of 2 keys fit"):
        load_into(nn.Linear(2, 2), read_state_dict(tmp_path / "a.pt"))
    with pytest.raises(UsageError, match=r"begins with the strip_prefix 'modul\.': did you mean `module\.`"):
        read_state_dict(tmp_path / "a.pt", strip_prefix="modul.")


def test_a_prefix_that_the_model_has_and_the_file_lacks(tmp_path: Path) -> None:
    path = save(nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"the model's own keys begin with `inner\.`"):
        load_into(nn.ModuleDict({"inner": nn.Linear(2, 2)}), read_state_dict(path))


def test_one_shard_of_several(tmp_path: Path) -> None:
    index = save_sharded(tmp_path / "m", nn.Linear(2, 2).state_dict())
    with pytest.raises(UsageError, match="it is shard 1 of 2: give the folder or the index file"):
        load_into(nn.Linear(2, 2), read_state_dict(index.parent / "model-00001-of-00002.safetensors"))
    index.unlink()
    with pytest.raises(UsageError, match="2 numbered shards and no index"):
        read_state_dict(index.parent)


def test_a_model_with_a_loader_of_its_own(tmp_path: Path) -> None:
    class Own(nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]  # as users do
            return super().load_state_dict({k.removeprefix("x."): v for k, v in state_dict.items()}, strict)

    torch.save({"x.weight": torch.ones(2, 2), "x.bias": torch.ones(2)}, tmp_path / "a.pt")
    model = Own(2, 2)
    result = load_into(model, read_state_dict(tmp_path / "a.pt"))
    assert model.weight.tolist() == [[1, 1], [1, 1]]
    assert result.mapped_bytes == 0


def test_a_layout_that_transformers_converts(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    config = transformers.MixtralConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=8,
        vocab_size=11,
        num_local_experts=2,
    )
    source, model = transformers.MixtralForCausalLM(config), transformers.MixtralForCausalLM(config)
    source.save_pretrained(tmp_path / "m")
    state = read_state_dict(tmp_path / "m")
    assert any("experts.0.w1" in name for name in state)
    random = torch.get_rng_state()
    result = load_into(model, state)
    assert torch.equal(torch.get_rng_state(), random)
    assert any("transformers converted" in note for note in result.notes)
    for name, wanted in source.state_dict().items():
        assert same(model.state_dict()[name], wanted), name
    lacking = {name: tensor for name, tensor in state.items() if name != "model.norm.weight"}
    with pytest.raises(UsageError, match=r"model\.norm\.weight"):
        load_into(transformers.MixtralForCausalLM(config), lacking)


def test_misfits_name_keys_and_shapes(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 3), "bias": torch.ones(4)}, tmp_path / "a.pt")
    with pytest.raises(UsageError) as caught:
        load_into(nn.Linear(2, 2), read_state_dict(tmp_path / "a.pt"))
    text = str(caught.value)
    assert "weight is [2, 3] in the checkpoint and [2, 2] in the model" in text
    assert "bias is [4] in the checkpoint and [2] in the model" in text
    assert "\n" not in text


def test_saved_buffers_that_the_model_makes_itself_are_left_alone(tmp_path: Path) -> None:
    torch.save({**filled(Mixed()).state_dict(), "transient": torch.ones(2)}, tmp_path / "a.pt")
    model = Mixed()
    result = load_into(model, read_state_dict(tmp_path / "a.pt"))
    assert result.unexpected == ()
    assert any("left alone: transient" in note for note in result.notes)
    assert model.transient.tolist() == [5, 5]


def test_lazy_conjugates_and_negatives(tmp_path: Path) -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {"conjugate": values.conj(), "negative": values.clone().conj().imag}
    torch.save(tensors, tmp_path / "a.pt")
    found = read_state_dict(tmp_path / "a.pt")
    assert found["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert found["negative"].tolist() == [-2, 4]


def test_many_unexpected_keys_are_counted(tmp_path: Path) -> None:
    state = {**nn.Linear(2, 2).state_dict(), **{f"extra{number}": torch.ones(1) for number in range(15)}}
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"15 of its 17 keys are not in the model: extra0, .*, extra9, and 5 more"):
        load_into(nn.Linear(2, 2), read_state_dict(tmp_path / "a.pt"))
    result = load_into(nn.Linear(2, 2), read_state_dict(tmp_path / "a.pt"), strict=False)
    assert len(result.unexpected) == 15


def test_nothing_that_matches_is_an_error_even_when_lenient(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"nothing in checkpoint .* matches the model"):
        load_into(nn.Linear(2, 2), read_state_dict(tmp_path / "a.pt"), strict=False)


def test_a_file_with_one_tensor_or_none(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "one.pt")
    with pytest.raises(UsageError, match="is a single tensor and no state dict"):
        read_state_dict(tmp_path / "one.pt")
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    with pytest.raises(UsageError, match="holds no tensors"):
        read_state_dict(tmp_path / "none.pt")


def test_own_loading_hooks_run(tmp_path: Path) -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.current = nn.Parameter(torch.zeros(2))
            self.register_load_state_dict_pre_hook(self.rename)

        @staticmethod
        def rename(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            state[f"{prefix}current"] = state.pop(f"{prefix}former")

    save_file({"former": torch.ones(2, dtype=torch.float16)}, tmp_path / "a.safetensors")
    model = Renamed()
    parameter = model.current
    assert load_into(model, read_state_dict(tmp_path / "a.safetensors")).missing == ()
    assert model.current is parameter
    assert model.current.dtype == torch.float32
    assert model.current.tolist() == [1, 1]
