"""Input that cannot be used, through the whole program: one line on stderr, the right code, nothing written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanprobe.cli import main

TOY = """
import sys

import torch
import torch.nn.functional as F
from torch import nn


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)

    def forward(self, input_ids, attention_mask=None):
        hidden = self.tokens(input_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask.unsqueeze(-1)
        return self.head(hidden)


class Acting(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.act = act

    def forward(self, x):
        self.act()
        return self.fc(x)


def raising():
    raise ValueError("the weather is bad")


def linear():
    return nn.Sequential(nn.Linear(3, 2))


def mismatched():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(5, 2))


def fails():
    return Acting(raising)


def exits():
    return Acting(sys.exit)


def hungry():
    return Acting(lambda: torch.empty(10**14))


def interrupted():
    def act():
        raise KeyboardInterrupt

    return Acting(act)


def no_module():
    return 3


def classes(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["input_ids"].flatten() + 5)


def not_scalar(output, batch):
    return output.mean(-1)
"""

IDS = torch.tensor([[1, 2], [3, 4]])


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.py").write_text(TOY)
    batches = {
        "ids": {"input_ids": IDS},
        "misspelt": {"input_idz": IDS},
        "vocabulary": {"input_ids": IDS + 8},
        "longer": {"input_ids": IDS, "attention_mask": torch.ones(2, 3)},
        "list": {"input_ids": [1, 2]},
        "large": {"input_ids": IDS + 3},
        "x": torch.ones(2, 3),
        "wide": torch.ones(2, 5),
        "double": torch.ones(2, 3).double(),
        "empty": {},
    }
    for name, batch in batches.items():
        torch.save(batch, tmp_path / f"{name}.pt")
    save_file({"tokens.weight": torch.zeros(3, 4)}, tmp_path / "small.safetensors")
    (tmp_path / "page.pt").write_text("<!doctype html>")
    before = list(sys.path)
    yield tmp_path
    assert sys.path == before


@pytest.mark.parametrize(
    ("factory", "batch", "more", "code", "parts"),
    [
        ("Decoder", "none", "", 2, ["none.pt: no such file"]),
        ("Decoder", "page", "", 2, ["page.pt is a web page"]),
        ("Decoder", "misspelt", "", 2, ["`input_idz`", "did you mean `input_ids`?"]),
        ("Decoder", "empty", "", 2, ["needs the argument `input_ids`"]),
        ("Decoder", "vocabulary", "", 2, ["`input_ids` holds ids from 9 to 12", "`tokens` (Embedding)", "10 entries"]),
        ("Decoder", "longer", "", 2, ["`input_ids` [2, 2]", "`attention_mask` [2, 3]"]),
        ("Decoder", "list", "", 2, ["`input_ids` is a list"]),
        ("Decoder", "ids", "checkpoint: none.pt", 2, ["none.pt"]),
        ("Decoder", "ids", "checkpoint: page.pt", 2, ["page.pt"]),
        ("Decoder", "ids", "checkpoint: small.safetensors", 2, ["tokens.weight", "[3, 4]", "[10, 4]"]),
        ("Decoder", "ids", "loss: {factory: 'toy.py:clases'}", 2, ["`clases`", "`classes`"]),
        ("Decoder", "ids", "loss: {factory: 'toy.py:not_scalar'}", 2, ["not_scalar", "shape [2, 2]"]),
        (
            "Decoder",
            "large",
            "loss: {factory: 'toy.py:classes'}",
            2,
            ["an id is out of range in the loss", "`input_ids` holds 4 to 7"],
        ),
        ("Decoder", "ids", "device: cuda:99", 2, ["cuda:99"]),
        ("linear", "x", "backward: true", 2, ["there is no loss"]),
        ("linear", "wide", "", 2, ["[2, 5] does not fit `0` (Linear)"]),
        ("linear", "double", "", 2, ["(float64)", "`0` (Linear)"]),
        ("decoder", "ids", "", 2, ["no `decoder`", "`Decoder`"]),
        ("raising", "x", "", 2, ["raised ValueError: the weather is bad", "toy.py:"]),
        ("no_module", "x", "", 2, ["returned a int", "torch.nn.Module"]),
        ("mismatched", "x", "", 3, ["RuntimeError", "2x4 and 5x2"]),
        ("fails", "x", "", 3, ["ValueError", "the weather is bad"]),
        ("exits", "x", "", 3, ["sys.exit"]),
        ("hungry", "x", "", 3, ["out of memory"]),
    ],
)
def test_one_line_and_its_code(
    capsys: pytest.CaptureFixture[str], factory: str, batch: str, more: str, code: int, parts: list[str]
) -> None:
    Path("nanprobe.yaml").write_text(f"model: {{factory: 'toy.py:{factory}'}}\nbatch: {batch}.pt\n{more}\n")
    assert main(["compare-precisions", "-o", "report.json"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    assert err.startswith("nanprobe: error: ")
    for part in parts:
        assert part in err
    assert not Path("report.json").exists()
    assert main(["replay", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["exit_code"] == code


def test_an_interrupt_inside_a_lane(capsys: pytest.CaptureFixture[str]) -> None:
    Path("nanprobe.yaml").write_text("model: {factory: 'toy.py:interrupted'}\nbatch: x.pt\n")
    assert main(["compare-precisions", "-o", "report.json"]) == 130
    assert capsys.readouterr() == ("", "nanprobe: interrupted\n")
    assert not Path("report.json").exists()


def test_the_same_program_takes_good_input(capsys: pytest.CaptureFixture[str]) -> None:
    Path("nanprobe.yaml").write_text("model: {factory: 'toy.py:Decoder'}\nbatch: ids.pt\n")
    assert main(["compare-precisions"]) == 0
    assert capsys.readouterr().err == ""
