"""How fast checkpoints are scanned, and how much memory that takes.

A checkpoint of 60 % bf16, 20 % fp16 and 20 % FP32 is written to a temporary folder and stays in the page cache.
Measured in processes of their own, medians of some rounds, all in one run:

- the usual loop: ``isnan().sum(), isinf().sum(), min, max, mean, std`` of each tensor that ``safetensors`` maps,
- the same with an allocator that keeps large blocks, since most of its time is page faults of temporaries,
- one bare ``torch.aminmax`` of each tensor,
- ``nanprobe scan-checkpoint --json``: ``summary.seconds`` and the whole process, start-up included,
- the same for a ``torch.save`` file, with and without its checksums,
- the peak of resident memory, the growth with size, and a file of 10 kB beside ``import torch``.

Usage: ``python -m benchmarks scan``, or ``python -m benchmarks.scan --size 200`` (in MB). Linux only; needs twice the
size of disk and of page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TENSOR = 32 << 20
"""Bytes of one tensor."""

SPEEDUP, AGAINST_AMINMAX, WHOLE_PROCESS, WITH_CHECKSUMS = 25.0, 5.0, 8.0, 2.0
MEMORY = 450e6
SMALL = 0.5

USUAL = """
import sys, time
import torch
from safetensors import safe_open
with safe_open(sys.argv[1], "pt") as file:
    tensors = [file.get_tensor(name) for name in file.keys()]
for tensor in tensors:
    tensor.view(torch.uint8).max()
start = time.perf_counter()
for tensor in tensors:
    {body}
print(time.perf_counter() - start)
"""
LOOP = (
    "tensor.isnan().sum(), tensor.isinf().sum(), tensor.min(), tensor.max(), "
    "tensor.float().mean(), tensor.float().std()"
)
AMINMAX = "torch.aminmax(tensor)"

SCAN = """
import json, resource, subprocess, sys, time
command = [sys.executable, "-m", "nanprobe", "scan-checkpoint", *sys.argv[1:], "--json"]
start = time.perf_counter()
done = subprocess.run(command, capture_output=True)
seconds = time.perf_counter() - start
report = json.loads(done.stdout)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps([report["summary"]["seconds"], seconds, peak, report["summary"]["bytes"], done.returncode]))
"""


def write_checkpoints(folder: Path, size: int, *, torch_file: bool) -> None:
    """Write ``model.safetensors`` of about ``size`` bytes, and ``model.pt`` of the same tensors."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    kinds = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.bfloat16)
    base = torch.randn(TENSOR // 2, generator=generator) * 0.02
    tensors = {}
    for at in range(max(size // TENSOR, 5)):
        kind = kinds[at % 5]
        values = base[: TENSOR // kind.itemsize].to(kind)
        tensors[f"layers.{at}.weight"] = values.roll(at * 1000).reshape(2048, -1)
    save_file(tensors, folder / "model.safetensors")
    if torch_file:
        torch.save(tensors, folder / "model.pt")


def seconds_of(body: str, path: Path, *, tuned: bool = False) -> float:
    """Return what the body takes over all tensors, each of which was touched before."""
    environment = dict(os.environ)
    if tuned:
        # Large blocks come from the heap and stay in it.
        environment |= {
            "MALLOC_TOP_PAD_": str(1 << 30),
            "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
            "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
        }
    script = USUAL.format(body=body)
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, check=True, env=environment)
    return float(done.stdout)


def scan_of(*arguments: str) -> tuple[float, float, float, float]:
    """Return ``summary.seconds``, the seconds of the process, its peak memory and the bytes that were read."""
    done = subprocess.run([sys.executable, "-c", SCAN, *arguments], capture_output=True, check=True)
    inner, whole, peak, read, code = json.loads(done.stdout)
    if code != 0:
        raise SystemExit(f"the scan of {arguments} ended with {code}")
    return inner, whole, peak, read


def medians(rounds: list[tuple[float, ...]]) -> list[float]:
    """Return the median of each figure."""
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def line(name: str, seconds: float, size: float, bound: str = "") -> None:
    print(f"{name:<44}{seconds:8.3f} s {size / seconds / 1e9:7.2f} GB/s  {bound}")


def import_seconds() -> float:
    """Return what importing torch takes in a process of its own."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - start


def small_file(folder: Path, rounds: int) -> None:
    import torch
    from safetensors.torch import save_file

    path = folder / "small.safetensors"
    save_file({"w": torch.randn(50, 50)}, path)
    whole = statistics.median(scan_of(str(path))[1] for _ in range(rounds))
    importing = statistics.median(import_seconds() for _ in range(rounds))
    print(f"{'a file of 10 kB, whole process':<44}{whole:8.3f} s (at most {SMALL} s; import torch {importing:.3f} s)")


def compared(folder: Path, rounds: int) -> None:
    """Measure everything of one checkpoint and print it beside its bound."""
    path = folder / "model.safetensors"
    size = path.stat().st_size
    scan_of(str(path))  # the compiled loops are kept from here on
    usual: list[float] = []
    tuned: list[float] = []
    bare: list[float] = []
    plain: list[tuple[float, ...]] = []
    zipped: list[tuple[float, ...]] = []
    checked: list[tuple[float, ...]] = []
    for _ in range(rounds):
        usual.append(seconds_of(LOOP, path))
        tuned.append(seconds_of(LOOP, path, tuned=True))
        bare.append(seconds_of(AMINMAX, path))
        plain.append(scan_of(str(path)))
        zipped.append(scan_of(str(folder / "model.pt"), "--no-verify-crc"))
        checked.append(scan_of(str(folder / "model.pt")))
    loop, loop_tuned, aminmax = (statistics.median(figures) for figures in (usual, tuned, bare))
    inner, whole, peak, _ = medians(plain)
    line("the usual loop", loop, size)
    line("the usual loop, large blocks kept", loop_tuned, size)
    line("torch.aminmax", aminmax, size)
    line("scan, safetensors: summary.seconds", inner, size, f"{loop / inner:.1f} times less than the loop (25 wanted), "
         f"{loop_tuned / inner:.1f} than the tuned one, {inner / aminmax:.1f} times aminmax (5)")  # fmt: skip
    line("scan, safetensors: whole process", whole, size, f"{loop / whole:.1f} times less than the loop (8 wanted)")
    line("scan, torch.save without checksums", medians(zipped)[0], size, f"{loop / medians(zipped)[0]:.1f} times less")
    line("scan, torch.save with checksums", medians(checked)[0], size,
         f"{medians(checked)[0] / medians(zipped)[0]:.2f} times that without (2)")  # fmt: skip
    print(f"{'peak resident memory':<44}{peak / 1e6:8.0f} MB (at most {MEMORY / 1e6:.0f})")


def growth(folder: Path, sizes: list[int], rounds: int) -> None:
    """Measure scans of several sizes: seconds per gigabyte and memory should not depend on it."""
    for size in sizes:
        write_checkpoints(folder, size, torch_file=False)
        path = folder / "model.safetensors"
        inner, _, peak, read = medians([scan_of(str(path)) for _ in range(rounds)])
        print(
            f"{'scan of':<16}{read / 1e9:6.2f} GB {inner:8.3f} s  {inner / read * 1e9:6.3f} s/GB {peak / 1e6:8.0f} MB"
        )


def main(arguments: list[str] | None = None) -> None:
    """Measure and print each beside its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2000, help="megabytes of the checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--growth", default="500,2000,8000", help="megabytes of the checkpoints of the growth, or none")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoints(folder, options.size * 10**6, torch_file=True)
        compared(folder, options.rounds)
        small_file(folder, options.rounds)
        (folder / "model.pt").unlink()
        sizes = [int(part) * 10**6 for part in options.growth.split(",") if part and part != "none"]
        growth(folder, sizes, min(options.rounds, 3))


if __name__ == "__main__":
    main()
