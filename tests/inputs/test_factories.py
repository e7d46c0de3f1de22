"""Building what a config names: models and losses, from files, modules and transformers folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanprobe.config import LossSpec, ModelSpec, TransformersSpec
from nanprobe.errors import UsageError
from nanprobe.inputs.factories import import_folder
from nanprobe.inputs.loss import build_loss
from nanprobe.inputs.model import build_model

TOY = """
import torch
from torch import nn


class Toy(nn.Module):
    def __init__(self, width=3, bias=True):
        super().__init__()
        self.fc = nn.Linear(width, width, bias=bias)

    @classmethod
    def wide(cls):
        return cls(width=9)

    def forward(self, x):
        return self.fc(x)


def build(width=3):
    return Toy(width)


def needs(width, *, depth):
    return Toy(width)


def anything(**kwargs):
    return Toy(**kwargs)


def fails():
    raise ValueError("the width\\nis wrong")


def exits():
    raise SystemExit(3)


def interrupted():
    raise KeyboardInterrupt


def hungry():
    return torch.empty(10**14)


def nothing():
    pass


def not_built():
    return Toy


ready = Toy()
number = 3


def mse(output, batch):
    return (output ** 2).mean()


def scaled(output, batch, factor=1.0):
    return output.sum() * factor


def per_sample(output, batch):
    return output.sum(-1)


def plain_number(output, batch):
    return 1.0


def integer(output, batch):
    return torch.tensor(1)


def one_element(output, batch):
    return output.sum().reshape(1, 1)


def only_output(output):
    return output.sum()


class Loss:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, output, batch):
        return output.sum() * self.weight


class ModuleLoss(nn.Module):
    def forward(self, output, batch):
        return output.sum()


module_loss = ModuleLoss()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(TOY)
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "net.py").write_text("from toy import Toy\n\n\ndef build():\n    return Toy(5)\n")
    return tmp_path


def build(folder: Path, factory: str, seed: int = 0, **kwargs: Any) -> nn.Module:
    return build_model(ModelSpec(factory=factory, kwargs=kwargs), folder, seed)


@pytest.mark.parametrize(
    ("factory", "kwargs", "width"),
    [
        ("toy.py:build", {}, 3),
        ("toy.py:build", {"width": 4}, 4),
        ("toy.py:Toy", {"width": 2}, 2),
        ("toy.py:Toy.wide", {}, 9),
        ("toy:build", {}, 3),
        ("pack.net:build", {}, 5),
        ("pack/net.py:build", {}, 5),
        ("toy.py:anything", {"width": 6}, 6),
        ("toy.py:needs", {"width": 6, "depth": 1}, 6),
    ],
)
def test_a_model_from_a_factory(folder: Path, factory: str, kwargs: dict[str, Any], width: int) -> None:
    before = list(sys.path)
    model = build(folder, factory, **kwargs)
    assert sys.path == before
    assert model.get_parameter("fc.weight").shape == (width, width)


def test_an_absolute_file_path(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert isinstance(build(elsewhere, f"{folder / 'toy.py'}:build"), nn.Module)


def test_the_seed_decides_the_weights(folder: Path) -> None:
    first, same, other = (build(folder, "toy.py:build", seed).get_parameter("fc.weight") for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_random_numbers_drawn_by_an_import_do_not_shift_the_weights(folder: Path) -> None:
    (folder / "noisy.py").write_text(
        "import torch\nfrom toy import Toy\n\ntorch.rand(100)\n\n\ndef build():\n    return Toy()\n"
    )
    fresh = build(folder, "noisy.py:build", 1).get_parameter("fc.weight")
    cached = build(folder, "noisy.py:build", 1).get_parameter("fc.weight")
    assert torch.equal(fresh, cached)


def test_modules_of_the_same_name_in_two_folders(tmp_path: Path) -> None:
    for name, width in (("one", 1), ("two", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper.py").write_text(f"WIDTH = {width}\n")
        (tmp_path / name / "net.py").write_text(
            "import helper\nfrom torch import nn\n\n\ndef build():\n    return nn.Linear(helper.WIDTH, 1)\n"
        )
    for factory in ("net.py:build", "net:build"):
        widths = [build(tmp_path / name, factory).get_parameter("weight").shape[1] for name in ("one", "two", "one")]
        assert widths == [1, 2, 1]


def test_a_file_that_was_changed_is_read_again(folder: Path) -> None:
    path = folder / "small.py"
    path.write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(1, 1)\n")
    assert build(folder, "small.py:build").get_parameter("weight").shape == (1, 1)
    path.write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(12, 1)\n")
    assert build(folder, "small.py:build").get_parameter("weight").shape == (1, 12)


def test_model_and_loss_of_one_file_share_their_classes(folder: Path) -> None:
    (folder / "both.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Linear):\n    pass\n\n\ndef build():\n    return Net(1, 1)\n\n\n"
        "def loss(output, batch):\n    assert isinstance(batch, Net)\n    return output.sum()\n"
    )
    model = build(folder, "both.py:build")
    loss = build_loss(LossSpec(factory="both.py:loss"), folder)
    assert loss(torch.ones(2), model) == 2


def test_the_folder_is_on_the_path_while_the_factory_runs(folder: Path) -> None:
    (folder / "late.py").write_text("def build():\n    from toy import Toy\n\n    return Toy()\n")
    assert isinstance(build(folder, "late.py:build"), nn.Module)


@pytest.mark.parametrize(
    ("factory", "kwargs", "parts"),
    [
        ("toy", {}, ["expected package.module:callable", "'toy'"]),
        ("toy.py", {}, ["expected package.module:callable"]),
        ("toy.py:", {}, ["expected package.module:callable"]),
        (":build", {}, ["expected package.module:callable"]),
        ("missing.py:build", {}, ["missing.py: no such file"]),
        ("missing:build", {}, ["no module named `missing`"]),
        ("pack.missing:build", {}, ["no module named `pack.missing`"]),
        ("missing.deep.er:build", {}, ["no module named `missing`"]),
        ("..toy:build", {}, ["not the name of a module"]),
        ("toy.py:biuld", {}, ["has no `biuld`", "did you mean `build`?"]),
        ("toy.py:Toy.wode", {}, ["toy.py:Toy has no `wode`", "`wide`"]),
        ("toy.py:number", {}, ["not callable", "int"]),
        ("toy.py:ready", {}, ["is a module already"]),
        ("toy.py:build", {"widht": 1}, ["`model.kwargs`", "takes no `widht`", "`width`"]),
        ("toy.py:needs", {"width": 1}, ["`model.kwargs`", "depth"]),
        ("toy.py:fails", {}, ["raised ValueError: the width is wrong", "toy.py:32"]),
        ("toy.py:exits", {}, ["sys.exit"]),
        ("toy.py:nothing", {}, ["returned nothing"]),
        ("toy.py:not_built", {}, ["returned the class Toy itself"]),
        ("broken.py:build", {}, ["importing", "SyntaxError", "broken.py:2"]),
        ("broken:build", {}, ["importing broken", "SyntaxError", "broken.py:2"]),
        ("needy.py:build", {}, ["raised ModuleNotFoundError", "no_such_package", "needy.py:1"]),
        ("needy:build", {}, ["raised ModuleNotFoundError", "no_such_package", "needy.py:1"]),
        ("inner.py:build", {}, ["RuntimeError", "inner.py:6"]),
    ],
)
def test_a_factory_that_cannot_be_used(folder: Path, factory: str, kwargs: dict[str, Any], parts: list[str]) -> None:
    (folder / "broken.py").write_text("def build():\n    return (\n")
    (folder / "needy.py").write_text("import no_such_package\n")
    (folder / "inner.py").write_text(
        "from torch import nn\n\n\ndef build():\n    layer = nn.Linear(1, 1)\n    return layer.load_state_dict({})\n"
    )
    before = list(sys.path)
    with pytest.raises(UsageError) as caught:
        build(folder, factory, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert "`model." in message
    for part in parts:
        assert part in message
    assert sys.path == before


def test_a_module_that_another_one_hides_is_told(folder: Path) -> None:
    (folder / "json.py").write_text("def build():\n    pass\n")
    with pytest.raises(UsageError, match=r"the module `json` was loaded from .* name the file"):
        build(folder, "json:build")


def test_nanprobe_itself_is_not_forgotten(folder: Path) -> None:
    root = Path(sys.modules["nanprobe"].__file__ or "").parent.parent
    sys.modules.pop("nanprobe.nearest")
    with import_folder(root):
        import nanprobe.nearest as imported_there
    with import_folder(folder):
        assert sys.modules["nanprobe.nearest"] is imported_there


def test_an_interrupt_and_a_lack_of_memory_are_no_mistake_of_the_factory(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(folder, "toy.py:interrupted")
    with pytest.raises(RuntimeError, match="allocate"):
        build(folder, "toy.py:hungry")


@pytest.mark.parametrize(
    ("factory", "kwargs", "value"),
    [
        ("toy.py:mse", {}, 4.0),
        ("toy.py:scaled", {"factor": 2.0}, 8.0),
        ("toy.py:Loss", {"weight": 3}, 12.0),
        ("toy.py:ModuleLoss", {}, 4.0),
        ("toy.py:module_loss", {}, 4.0),
        ("toy.py:one_element", {}, 4.0),
    ],
)
def test_a_loss(folder: Path, factory: str, kwargs: dict[str, Any], value: float) -> None:
    loss = build_loss(LossSpec(factory=factory, kwargs=kwargs), folder)
    result = loss(torch.tensor([2.0, 2.0]), None)
    assert result.shape == ()
    assert result == value


def test_the_loss_of_a_library(folder: Path) -> None:
    loss = build_loss(LossSpec(factory="torch.nn:MSELoss"), folder)
    assert loss(torch.ones(3), torch.zeros(3)) == 1


@pytest.mark.parametrize(
    ("factory", "kwargs", "parts"),
    [
        ("toy.py:number", {}, ["not callable"]),
        ("toy.py:mze", {}, ["has no `mze`", "`mse`"]),
        ("toy.py:Loss", {}, ["`loss.kwargs`", "weight"]),
        ("toy.py:Loss", {"wieght": 1}, ["takes no `wieght`", "`weight`"]),
        ("toy.py:module_loss", {"a": 1}, ["a module already"]),
        ("toy.py:only_output", {}, ["called as loss(output, batch)"]),
    ],
)
def test_a_loss_that_cannot_be_used(folder: Path, factory: str, kwargs: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        build_loss(LossSpec(factory=factory, kwargs=kwargs), folder)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("factory", "part"),
    [("per_sample", "shape [2]"), ("plain_number", "returned a float"), ("integer", "torch.int64")],
)
def test_a_loss_that_returns_no_scalar(folder: Path, factory: str, part: str) -> None:
    loss = build_loss(LossSpec(factory=f"toy.py:{factory}"), folder)
    with pytest.raises(UsageError) as caught:
        loss(torch.ones(2, 3), None)
    assert part in str(caught.value)
    assert factory in str(caught.value)


TINY_BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
    "dtype": "bfloat16",
}


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY_BERT))
    return tmp_path


def from_transformers(path: Path, class_: str, *, with_weights: bool = True, **kwargs: Any) -> nn.Module:
    spec = ModelSpec(transformers=TransformersSpec(path=path, class_=class_, kwargs=kwargs))
    return build_model(spec, path.parent, 0, with_weights=with_weights)


@pytest.mark.parametrize("class_", ["AutoModelForSequenceClassification", "BertForSequenceClassification"])
def test_a_transformers_model_is_random_and_fp32(bert: Path, class_: str) -> None:
    by_folder = from_transformers(bert, class_, num_labels=5)
    by_file = from_transformers(bert / "config.json", class_, num_labels=5)
    assert type(by_folder).__name__ == "BertForSequenceClassification"
    assert by_folder.get_parameter("classifier.weight").shape == (5, 8)
    weights, again = dict(by_folder.named_parameters()), dict(by_file.named_parameters())
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_the_weights_of_a_transformers_folder_are_loaded_unless_a_checkpoint_brings_them(
    bert: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    saved = from_transformers(bert, "AutoModel")
    with torch.no_grad():
        saved.get_parameter("embeddings.word_embeddings.weight").fill_(0.25)
    folder = tmp_path_factory.mktemp("saved")
    saved.save_pretrained(folder)  # type: ignore[operator]  # a method of transformers' base class
    loaded = from_transformers(folder, "AutoModel").get_parameter("embeddings.word_embeddings.weight")
    random = from_transformers(folder, "AutoModel", with_weights=False).get_parameter(
        "embeddings.word_embeddings.weight"
    )
    assert loaded.dtype == torch.float32
    assert bool((loaded == 0.25).all())
    assert not bool((random == 0.25).any())


@pytest.mark.parametrize(
    ("where", "class_", "parts"),
    [
        (".", "AutoModelForCausalML", ["has no `AutoModelForCausalML`", "`AutoModelForCausalLM`"]),
        (".", "AutoTokenizer", ["builds no model"]),
        (".", "BertConfig", ["builds no model"]),
        ("none", "AutoModel", ["no such folder or file"]),
        ("empty", "AutoModel", ["no config.json"]),
        ("broken.json", "AutoModel", ["`model.transformers`", "raised"]),
    ],
)
def test_a_transformers_model_that_cannot_be_built(bert: Path, where: str, class_: str, parts: list[str]) -> None:
    (bert / "empty").mkdir()
    (bert / "broken.json").write_text("{")
    with pytest.raises(UsageError) as caught:
        from_transformers(bert / where, class_)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


STRANGE = """
import os
from torch import nn


class Mute(Exception):
    def __str__(self):
        raise ValueError("no")


class Bare(nn.Module):
    def __init__(self):
        pass


def mute():
    raise Mute


def bare():
    return Bare()


def bare_inside():
    return nn.Sequential(nn.Linear(2, 2), Bare())


def wanders():
    os.chdir("/")
    return nn.Linear(2, 2)
"""


@pytest.mark.parametrize(
    ("factory", "part"),
    [
        ("strange.py:mute", "strange.py:mute raised Mute ("),
        ("strange.py:bare", "class Bare does not call super().__init__()"),
        ("strange.py:bare_inside", "Bare"),
        ("x" * 5000 + ".py:build", "no such file"),
    ],
)
def test_factories_that_go_wrong_in_strange_ways(tmp_path: Path, factory: str, part: str) -> None:
    (tmp_path / "strange.py").write_text(STRANGE)
    with pytest.raises(UsageError) as caught:
        build(tmp_path, factory)
    assert part in str(caught.value)


def test_a_factory_that_leaves_its_folder_is_brought_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "strange.py").write_text(STRANGE)
    monkeypatch.chdir(tmp_path)
    build(tmp_path, "strange.py:wanders")
    assert Path.cwd() == tmp_path.resolve()
