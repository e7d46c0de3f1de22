"""Damaged copies of good files: what disks, networks and attackers do to bytes, from a seed.

``python -m tests.checkpoints.mutation SECONDS`` goes on for as long as one likes and prints what it met.
"""

from __future__ import annotations

import os
import pickle
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from nanprobe.checkpoints import Damage, index_checkpoint, stream_extent
from nanprobe.checkpoints.blocks import BLOCKS, can_decode, decode_blocks
from nanprobe.errors import NanprobeError
from nanprobe.inputs.weights import read_state_dict
from tests.checkpoints import layouts
from tests.checkpoints.handmade import OBJECTS, gguf_bytes, onnx_model
from tests.checkpoints.make import every_dtype, rezip, safetensors_dtypes, save_sharded, with_views

NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)


@dataclass(frozen=True)
class Target:
    """A checkpoint and the file of it that is to be damaged; ``kind`` names what it is a case of."""

    kind: str
    path: Path
    file: Path


def fixtures(folder: Path) -> list[Target]:
    """Write one good checkpoint for every reader and return what is to be damaged."""
    made = [Target(path.name, path, path) for path in _files(folder)]
    for kind, root in _folders(folder):
        files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix not in (".py", ".md")]
        made.extend(Target(kind, root, file) for file in files)
    return made


def _files(folder: Path) -> list[Path]:
    tensors = {**every_dtype(), **with_views()}
    torch.save(tensors, folder / "zip.pt")
    torch.save({"model": tensors, "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}}}, folder / "nested.pt")
    torch.save(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)), folder / "module.pt")
    torch.save(tensors, folder / "protocol4.pt", pickle_protocol=4)
    torch.save(tensors, folder / "protocol0.pt", pickle_protocol=0)
    torch.save(tensors, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(layouts.lightning_state(), folder / "lightning.ckpt")
    rezip(folder / "zip.pt", folder / "deflated.pt")
    save_file(safetensors_dtypes(), folder / "plain.safetensors")
    objects = {**OBJECTS, "tensor": torch.ones(3)}
    for protocol in (1, 4, 5):
        (folder / f"pickle{protocol}.pkl").write_bytes(pickle.dumps(objects, protocol=protocol))
    arrays = {name: array for name, array in OBJECTS.items() if isinstance(array, np.ndarray) and name != "long"}
    np.savez(folder / "arrays.npz", **arrays)
    np.savez_compressed(folder / "packed.npz", **arrays)
    np.save(folder / "array.npy", OBJECTS["a"])
    (folder / "small.gguf").write_bytes(gguf_bytes())
    (folder / "blocks.gguf").write_bytes(gguf_bytes(shape=32, kind=2))
    layouts.save_nemo(folder / "plain.nemo")
    layouts.save_nemo(folder / "packed.nemo", compressed=True)
    return [path for path in sorted(folder.iterdir()) if path.is_file()]


def _folders(folder: Path) -> Iterator[tuple[str, Path]]:
    save_sharded(folder / "sharded", {name: torch.ones(3) for name in "abcd"})
    yield "sharded", folder / "sharded"
    save_sharded(folder / "bins", {name: torch.ones(3) for name in "abcd"}, suffix=".bin")
    yield "sharded bin", folder / "bins"
    yield "dcp", layouts.save_dcp_training(folder / "dcp")[0]
    yield "dcp blocks", layouts.split_dcp(folder / "blocks")
    for stage in (1, 3):
        yield f"zero {stage}", layouts.save_deepspeed(folder / f"zero{stage}", stage)
    yield "universal", layouts.save_universal(folder / "universal")
    yield "megatron", layouts.save_megatron(folder / "megatron")
    yield "megatron legacy", layouts.save_megatron_legacy(folder / "legacy")
    yield "trainer", layouts.save_trainer(folder / "trainer")
    yield "accelerate", layouts.save_accelerate(folder / "accelerate")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "a.onnx").write_bytes(onnx_model("a.data"))
    (folder / "onnx" / "a.data").write_bytes(bytes(16))
    yield "onnx", folder / "onnx"


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
    """Index the checkpoint and read every storage; return how that ended. Any error that is not ours goes through."""
    try:
        index = index_checkpoint(path)
    except NanprobeError as error:
        _one_line(error)
        return "refused"
    if path.is_file():
        try:
            read_state_dict(path)
        except NanprobeError as error:
            _one_line(error)
    for entry in index.tensors:
        assert entry.missing >= 0
        assert all(piece.storage in index.storages for piece in entry.pieces)
    for storage in index.storages.values():
        try:
            data = b"".join(part for extent in storage.extents for part in stream_extent(extent))
            assert len(data) == storage.size
            if storage.dtype in BLOCKS and can_decode(storage.dtype):
                decode_blocks(np.frombuffer(data, np.uint8), storage.dtype)
        except Damage:
            return "damaged data"
    return "problems" if index.problems else "unnoticed"


def _one_line(error: NanprobeError) -> None:
    if "\n" in str(error):
        raise AssertionError(f"more than one line: {error}") from error


def _damage(target: Target, original: bytes, seed: int) -> None:
    """Damage the file, or take it away, or put another file of the checkpoint in its place."""
    draw = random.Random(seed)
    others = [path for path in target.file.parent.iterdir() if path.is_file()]
    choice = draw.randrange(40) if target.path.is_dir() else 40
    if choice == 0:
        target.file.unlink()
    elif choice == 1 and others:
        target.file.write_bytes(draw.choice(others).read_bytes())
    else:
        target.file.write_bytes(mutate(original, seed))


def run(
    targets: list[Target], cases: int, first_seed: int = 0, seconds: float | None = None
) -> tuple[Counter[str], Counter[str], float, str]:
    """Damage the files in turn and read each checkpoint.

    Return how often each outcome came, how many cases each kind had, the seconds of the slowest and which it was.
    """
    outcomes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    slowest, where = 0.0, ""
    started = time.monotonic()
    originals = {target.file: target.file.read_bytes() for target in targets}
    by_kind: dict[str, list[Target]] = {}
    for target in targets:
        by_kind.setdefault(target.kind, []).append(target)
    names = list(by_kind)
    for case in range(cases):
        # Every kind gets its turn, however many files it has.
        own = by_kind[names[case % len(names)]]
        target = own[case // len(names) % len(own)]
        begun = time.monotonic()
        try:
            _damage(target, originals[target.file], first_seed + case)
            outcomes[survive(target.path)] += 1
        except BaseException:
            sys.stderr.write(f"seed {first_seed + case}, case {case}: {target.file}\n")
            raise
        finally:
            target.file.write_bytes(originals[target.file])
        kinds[target.kind] += 1
        taken = time.monotonic() - begun
        if taken > slowest:
            slowest, where = taken, f"seed {first_seed + case}, case {case}: {target.file.name} of {target.kind}"
        if seconds is not None and time.monotonic() - started > seconds:
            break
    return outcomes, kinds, slowest, where


def main() -> None:
    """Run for as many seconds as the command line says."""
    import resource

    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else int.from_bytes(os.urandom(4), "little")
    with tempfile.TemporaryDirectory() as name:
        outcomes, kinds, slowest, where = run(fixtures(Path(name)), 1 << 60, seed, seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    sys.stdout.write(
        f"{sum(outcomes.values()):,} cases from seed {seed}, slowest {slowest:.2f} s ({where}), peak {peak:.0f} MB\n"
        f"outcomes: {dict(outcomes)}\ncases by kind: {dict(kinds)}\n"
    )


if __name__ == "__main__":
    main()
