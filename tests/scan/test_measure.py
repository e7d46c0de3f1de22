"""How work is cut does not show in what is counted: segments, batches, threads, views, repeated elements."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nanprobe.checkpoints import index_checkpoint
from nanprobe.checkpoints.records import Storage
from nanprobe.formats import by_name
from nanprobe.numerics.stored import Counter, Tally
from nanprobe.scan import look, measure, strided
from nanprobe.scan.look import Looker, boxes
from nanprobe.scan.reading import Files, read_range

CASTS = [by_name("fp16"), by_name("fp8-e4m3")]


def tallies(path: Path, **options: int) -> dict[str, Tally]:
    index = index_checkpoint(path)
    result = measure.measure(index.tensors, index.storages, CASTS, **options)
    assert result.problems == []
    assert result.unreadable == {}
    return {entry.name: result.tallies[at] for at, entry in enumerate(index.tensors)}


def rounded(found: dict[str, Tally]) -> dict[str, tuple[object, ...]]:
    """Return everything but sums, which depend on their order by rounding errors."""
    return {
        name: (one.elements, one.nan, one.posinf, one.neginf, one.zero, one.subnormal, one.low, one.high, one.overflow,
               one.underflow)
        for name, one in found.items()
    }  # fmt: skip


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_segments_and_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        str(kind): torch.randint(0, 256, (90_000,), generator=generator, dtype=torch.uint8).view(kind)
        for kind in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int16)
    } | {f"small.{at}": torch.randn(at, generator=generator) for at in range(20)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    whole = tallies(path, workers=1)
    monkeypatch.setattr(measure, "_SEGMENT", 1 << 14)
    monkeypatch.setattr(measure, "_TASK", 1 << 13)
    monkeypatch.setattr(measure, "CHUNK", 1 << 12)
    if compiled:
        monkeypatch.setattr(measure, "COMPILED_FROM", 0)
        monkeypatch.setattr(measure, "COMPILE_FROM", 0)
    cut = tallies(path, workers=workers)
    assert rounded(cut) == rounded(whole)
    for name, tally in cut.items():
        if math.isfinite(tally.squares):
            assert tally.squares == pytest.approx(whole[name].squares, rel=1e-9)


def test_views_and_second_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = torch.randn(6, 7, 5, generator=torch.Generator().manual_seed(0))
    made = {
        "whole": base,
        "transposed": base.transpose(0, 2),
        "sliced": base[:, ::2, 1:],
        "repeated": base[:1].expand(4, 7, 5),
        "column": torch.randn(3, 1).expand(3, 200),
        "scalar": torch.tensor(3.0),
        "half": base.half().permute(1, 2, 0),
        "negative": torch.randn(4, dtype=torch.complex64).imag,
        "bits": base[0] > 0,
    }
    path = tmp_path / "views.pt"
    torch.save(made, path)
    index = index_checkpoint(path)
    found = tallies(path)
    monkeypatch.setattr(look, "BOX", 16)
    with Looker(index.storages) as looks:
        for entry in index.tensors:
            expected = made[entry.name].resolve_neg().double().numpy()
            for limit in (1, 3, 64, 10**6):
                values = np.full(entry.shape, np.nan)
                for start, size in boxes(entry.shape, limit):
                    place = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
                    values[place] = looks.read(entry, (start, size))
                assert np.array_equal(values, expected), entry.name
            first = looks.first(entry, {"above": lambda values: values > 0.5}).get("above")
            there = np.argwhere(expected > 0.5)
            assert first == (tuple(there[0]) if len(there) else None), entry.name
            tally = found[entry.name]
            assert (tally.elements, tally.low, tally.high) == (expected.size, expected.min(), expected.max()), (
                entry.name
            )
            assert tally.total == pytest.approx(expected.sum(), rel=1e-6, abs=1e-6)


def test_sums_beyond_fp64_are_inf_without_a_warning() -> None:
    values = np.full(6, 1e308)
    counters = [Counter("float64") for _ in range(2)]
    for counter in counters:
        counter.feed(np.frombuffer(values.tobytes(), np.uint8))
    counters[0].merge(counters[1])
    tally = counters[0].finish()
    assert tally.squares == np.inf
    assert tally.high == 1e308


@pytest.mark.parametrize("dense", [True, False])
def test_a_transposed_view_reads_its_storage_a_few_times_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dense: bool
) -> None:
    held = torch.randn(600, 640, generator=torch.Generator().manual_seed(0))
    held[7, 598], held[599, 3] = math.nan, math.inf
    view = held.t() if dense else held[:, :599].t()
    path = tmp_path / "view.pt"
    torch.save({"w": view}, path)
    monkeypatch.setattr(strided, "CHUNK", 1 << 14)
    read = []

    def counting(files: Files, storage: Storage, start: int, into: Any) -> None:
        read.append(into.nbytes)
        read_range(files, storage, start, into)

    for module in (strided, look, measure):
        monkeypatch.setattr(module, "read_range", counting)
    (found,) = tallies(path).values()
    assert (found.elements, found.nan, found.posinf) == (view.numel(), 1, 1)
    index = index_checkpoint(path)
    with Looker(index.storages) as looks:
        first = looks.first(index.tensors[0], {"nan": np.isnan, "inf": np.isinf})
        values = np.concatenate([looks.read(index.tensors[0], box).ravel() for box in boxes(view.shape, 50_000)])
    assert first == {"nan": (598, 7), "inf": (3, 599)}
    assert np.array_equal(values, view.contiguous().numpy().ravel(), equal_nan=True)
    # One pass of counting, one look for the first, and one read for each of eight boxes.
    assert sum(read) <= 12 * held.numel() * held.element_size()
