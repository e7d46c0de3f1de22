"""Damaged copies of good files: what disks, networks and attackers do to bytes, from a seed.

``python -m tests.checkpoints.mutation SECONDS`` goes on for as long as one likes and prints what it met.
"""

from __future__ import annotations

import os
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from nanprobe.checkpoints import Damage, index_checkpoint, stream_extent
from nanprobe.errors import NanprobeError
from nanprobe.inputs.weights import read_state_dict
from tests.checkpoints.make import every_dtype, rezip, safetensors_dtypes, save_sharded, with_views

NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


def fixtures(folder: Path) -> list[Path]:
    """Write one good file for every reader and return the files that are to be damaged."""
    tensors = {**every_dtype(), **with_views()}
    torch.save(tensors, folder / "zip.pt")
    torch.save({"model": tensors, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}}, folder / "nested.pt")
    torch.save(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), folder / "module.pt")
    torch.save(tensors, folder / "protocol4.pt", pickle_protocol=4)
    torch.save(tensors, folder / "protocol0.pt", pickle_protocol=0)
    torch.save(tensors, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    rezip(folder / "zip.pt", folder / "deflated.pt")
    save_file(safetensors_dtypes(), folder / "plain.safetensors")
    index = save_sharded(folder / "sharded", {name: torch.ones(3) for name in "abcd"})
    bins = save_sharded(folder / "bins", {name: torch.ones(3) for name in "abcd"}, suffix=".bin")
    return [*sorted(folder.glob("*.*")), index, bins, index.parent / "model-00001-of-00002.safetensors"]


def _flip(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _overwrite(data: bytearray, draw: random.Random) -> None:
    form = draw.choice(("<B", "<H", "<I", "<Q"))
    at = draw.randrange(len(data))
    part = struct.pack(form, draw.choice(NUMBERS) & ((1 << 8 * struct.calcsize(form)) - 1))
    data[at : at + len(part)] = part


def _cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def _remove(data: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(data))
    del data[at : at + draw.choice((1, 4, 100))]


def _insert(data: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(data))
    data[at:at] = draw.randbytes(draw.choice((1, 4, 100)))


def _zero(data: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(data))
    length = min(draw.choice((8, 512, 4096)), len(data) - at)
    data[at : at + length] = bytes(length)


def _splice(data: bytearray, draw: random.Random) -> None:
    source, target = draw.randrange(len(data)), draw.randrange(len(data))
    part = data[source : source + draw.choice((16, 256, 2048))]
    data[target : target + len(part)] = part


def _digits(data: bytearray, draw: random.Random) -> None:
    """Change a number that is written as text."""
    places = [at for at in range(min(len(data), 4000)) if 48 <= data[at] < 58]
    if places:
        at = draw.choice(places)
        data[at : at + 1] = str(draw.choice(NUMBERS)).encode()


def _crc(data: bytearray, draw: random.Random) -> None:
    """Take the checksums out, so that damage in the objects is not caught before they are read."""
    at = data.find(b"PK\1\2")
    while at >= 0:
        data[at + 16 : at + 20] = bytes(4)
        at = data.find(b"PK\1\2", at + 4)
    start = data.find(b"data.pkl")
    if start >= 0:
        for _ in range(draw.choice((1, 2, 5))):
            data[start + draw.randrange(min(4000, len(data) - start))] = draw.randrange(256)


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip,
    _overwrite,
    _cut,
    _remove,
    _insert,
    _zero,
    _splice,
    _digits,
    _crc,
    _crc,
)


def mutate(data: bytes, seed: int) -> bytes:
    """Return ``data`` damaged once or a few times."""
    draw = random.Random(seed)
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if changed:
            draw.choice(MUTATIONS)(changed, draw)
    return bytes(changed)


def survive(path: Path) -> str:
    """Index the file and read every storage; return how that ended. Any error that is not ours goes through."""
    try:
        index = index_checkpoint(path)
    except NanprobeError:
        return "refused"
    try:
        read_state_dict(path)
    except NanprobeError as error:
        if "\n" in str(error):
            raise AssertionError(f"more than one line: {error}") from error
    for storage in index.storages.values():
        try:
            for extent in storage.extents:
                for _ in stream_extent(extent):
                    pass
        except Damage:
            return "damaged data"
    return "problems" if index.problems else "unnoticed"


def run(files: list[Path], cases: int, first_seed: int = 0, seconds: float | None = None) -> Counter[str]:
    """Damage the files in turn and read each; return how often each outcome came."""
    outcomes: Counter[str] = Counter()
    started = time.monotonic()
    originals = {path: path.read_bytes() for path in files}
    for case in range(cases):
        path = files[case % len(files)]
        try:
            path.write_bytes(mutate(originals[path], first_seed + case))
            outcomes[survive(path)] += 1
        except BaseException:
            sys.stderr.write(f"seed {first_seed + case} of {path.name}\n")
            raise
        finally:
            path.write_bytes(originals[path])
        if seconds is not None and time.monotonic() - started > seconds:
            break
    return outcomes


def main() -> None:
    """Run for as many seconds as the command line says."""
    import resource

    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    with tempfile.TemporaryDirectory() as name:
        outcomes = run(fixtures(Path(name)), 1 << 60, int.from_bytes(os.urandom(4), "little"), seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(f"{sum(outcomes.values()):,} cases, peak {peak:.0f} MB: {dict(outcomes)}\n")


if __name__ == "__main__":
    main()
