"""The compiled loops as they are kept on disk: usable without the compiler, made again when they are damaged."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanprobe.numerics import native
from nanprobe.numerics.crc import crc32

_SCRIPT = """
import sys
import numpy as np
from nanprobe.numerics.native import load_kernels
from nanprobe.numerics.stored import Counter
kernels = load_kernels()
for dtype in ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn"):
    raw = np.random.default_rng(0).integers(0, 256, 80_000, dtype=np.uint8)
    with_it, without = Counter(dtype), Counter(dtype)
    with_it.feed(raw, kernels)
    without.feed(raw)
    one, other = with_it.finish(), without.finish()
    assert (one.nan, one.posinf, one.zero, one.subnormal, one.low, one.high) == (
        other.nan, other.posinf, other.zero, other.subnormal, other.low, other.high), dtype
assert "torch" not in sys.modules
print("numba" in sys.modules)
"""


def test_kept_code_needs_no_compiler() -> None:
    assert native.load_kernels() is not None
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout) == ("", "False\n")


def kept() -> bytes:
    """Return what this machine keeps of the compiled loops."""
    import llvmlite.binding as llvm

    assert native.load_kernels() is not None
    name = f"nanprobe-{native._key(llvm)}.kernels"
    return next(folder / name for folder in native._folders() if (folder / name).exists()).read_bytes()


@pytest.mark.parametrize("keep", [0, 10, 5000, -1])
def test_a_damaged_store_is_no_store(tmp_path: Path, keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite.binding as llvm

    whole = kept()
    monkeypatch.setattr(native, "_folders", lambda: [tmp_path])
    store = tmp_path / f"nanprobe-{native._key(llvm)}.kernels"
    store.write_bytes(whole[:keep])
    assert native._load(compile_missing=False) is None
    store.write_bytes(whole)
    assert native._load(compile_missing=False) is not None


def test_without_a_place_to_keep_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "_folders", lambda: [tmp_path / "file" / "below"])
    (tmp_path / "file").write_text("")
    assert native._load(compile_missing=True) is not None
    assert native._load(compile_missing=False) is None


@given(size=st.integers(0, 20_000), start=st.integers(0, 0xFFFFFFFF), seed=st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_checksums_are_those_of_zlib(size: int, start: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    assert crc32(data, start, native.load_kernels()) == zlib.crc32(data, start)
    assert crc32(data, start) == zlib.crc32(data, start)
