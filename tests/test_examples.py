"""The example configs and the sample runs build, load and run in plain FP32, and the sample runs can be made again."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nanprobe.config import load_config
from nanprobe.inputs.batch import load_batch
from nanprobe.inputs.call import bind
from nanprobe.inputs.loss import build_loss
from nanprobe.inputs.model import build_model
from nanprobe.inputs.state_dict import read_state_dict
from nanprobe.inputs.weights import load_into

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(ROOT.glob("configs/*.yaml")) + sorted(ROOT.glob("sample_runs/*/nanprobe.yaml"))
RUNS = sorted(path.parent.name for path in ROOT.glob("sample_runs/*/nanprobe.yaml"))


def script(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_are_there() -> None:
    assert [path.stem for path in CONFIGS if path.parent.name == "configs"] == [
        "autoencoder",
        "gpt",
        "recurrent",
        "transformers",
    ]
    assert len(RUNS) == 6


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_config_builds_loads_and_runs(path: Path) -> None:
    config = load_config(path)
    model = build_model(config.model, config.folder, config.settings.seed)
    if config.checkpoint is not None:
        load_into(model, read_state_dict(config.checkpoint.path), strict=config.checkpoint.strict)
    assert config.batch is not None
    batch = load_batch(config.batch).value
    call = bind(model, batch, config.batch.call)
    output = model(*call.args, **call.kwargs)
    loss = None
    if config.loss is not None:
        loss = build_loss(config.loss, config.folder)(output, batch)
    elif config.settings.backward:
        loss = output["loss"]
    if loss is not None:
        assert torch.isfinite(loss) == (path.parent.name != "nan-in-batch")
        loss.backward()
    assert 2e4 <= sum(parameter.numel() for parameter in model.parameters()) <= 4e5


@pytest.mark.parametrize("name", RUNS)
def test_a_sample_run_is_what_its_script_makes(name: str, tmp_path: Path) -> None:
    make = script("sample_runs/make.py")
    make.make(name, tmp_path)
    folder = ROOT / "sample_runs" / name
    assert (folder / "model.safetensors").stat().st_size < 300_000
    torch.testing.assert_close(
        read_state_dict(tmp_path / "model.safetensors"),
        read_state_dict(folder / "model.safetensors"),
        rtol=1e-4,
        atol=2e-5,
    )
    kept, made = (torch.load(place / "batch.pt") for place in (folder, tmp_path))
    torch.testing.assert_close(made, kept, rtol=0, atol=0, equal_nan=True)


def test_every_sample_run_has_its_maker() -> None:
    assert sorted(script("sample_runs/make.py").RUNS) == RUNS


def test_the_examples_batches_are_what_their_script_makes() -> None:
    made = script("configs/make_batches.py").batches()
    assert sorted(made) == sorted(path.name for path in (ROOT / "configs" / "batches").iterdir())
    for name, batch in made.items():
        torch.testing.assert_close(torch.load(ROOT / "configs" / "batches" / name), batch, rtol=0, atol=0)
