"""Counting a checkpoint: work is cut into bounded tasks, a few threads read and count, one merges.

The compiled loops release the interpreter's lock, so threads suffice. Memory is workers times one chunk, and some
counters for each job in progress; the size of the checkpoint does not enter.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from nanprobe.checkpoints.dtypes import BITS
from nanprobe.checkpoints.records import Damage, Problem, Storage, TensorEntry
from nanprobe.checkpoints.stream import CHUNK
from nanprobe.formats import NumberFormat
from nanprobe.numerics.native import Kernels, load_kernels
from nanprobe.numerics.stored import Counter, Tally, combined, negated
from nanprobe.progress import SILENT, Progress
from nanprobe.scan.blocks import count_blocks
from nanprobe.scan.plan import Block, Job, Plan, Range, blocks_dtype, plan
from nanprobe.scan.reading import Files, is_random_access, read_range, stream_whole
from nanprobe.scan.strided import strided_chunks

__all__ = ["COMPILED_FROM", "COMPILE_FROM", "Measured", "default_workers", "measure"]

COMPILED_FROM = 4 << 20
"""Bytes from which on loading the compiled loops pays; below, NumPy is done before they are loaded."""

COMPILE_FROM = 256 << 20
"""Bytes from which on compiling them pays, which takes some seconds once for a machine."""

_SEGMENT = 32 << 20
"""Bytes of one range that one worker takes at a time."""

_TASK = 8 << 20
"""Bytes of small ranges that make up one task."""

_MOST_WORKERS = 4
_QUEUED = 4
"""Tasks per worker that are handed out ahead."""


@dataclass(slots=True)
class Measured:
    """What the tensors hold, by their position: tallies, why some have none, and what was wrong with the bytes.

    ``bad_blocks`` counts, for tensors of block formats, the blocks whose scales are NaN or infinite. ``read`` is in
    bytes.
    """

    tallies: dict[int, Tally] = field(default_factory=dict)
    unreadable: dict[int, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    bad_blocks: dict[int, int] = field(default_factory=dict)
    read: int = 0


@dataclass(slots=True)
class _Unit:
    """Ranges of one storage to count together, or one block.

    ``whole`` means that all bytes of the storage are read in order (and their CRC compared); otherwise the ranges are
    read where they lie.
    """

    storage: str
    jobs: tuple[tuple[Job, int, int], ...]
    whole: bool = False


@dataclass(slots=True)
class _Outcome:
    counters: list[tuple[Job, Counter]] = field(default_factory=list)
    failed: list[tuple[Job, Problem]] = field(default_factory=list)
    doubtful: list[Problem] = field(default_factory=list)
    blocks: list[tuple[Job, int]] = field(default_factory=list)
    read: int = 0


def default_workers() -> int:
    """Return how many threads count at once: one per processor this process may use, at most four."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:
        usable = os.cpu_count() or 1
    return max(1, min(usable, _MOST_WORKERS))


def measure(
    tensors: Sequence[TensorEntry],
    storages: Mapping[str, Storage],
    casts: Sequence[NumberFormat] = (),
    *,
    check: bool = True,
    workers: int | None = None,
    progress: Progress = SILENT,
) -> Measured:
    """Read every byte that ``tensors`` are made of once and return what they hold.

    ``check`` compares the CRC of members of zip files that are read whole.
    """
    work = plan(tensors, storages)
    tasks = _tasks(work, storages, check)
    total = sum(length for task in tasks for unit in task for _, _, length in unit.jobs)
    result = Measured(unreadable=dict(work.refused))
    counters: dict[Job, Counter] = {}
    left = _segments_left(tasks)
    tallies: dict[Job, Tally] = {}
    failed: dict[Job, Problem] = {}
    blocks: dict[Job, int] = {}
    kernels = load_kernels(compile_missing=total >= COMPILE_FROM) if total >= COMPILED_FROM else None
    runner = _Runner(storages, casts, check=check, kernels=kernels)
    progress.stage("scan", len(tasks))
    for outcome in _run(runner, tasks, workers or default_workers()):
        result.read += outcome.read
        result.problems.extend(outcome.doubtful)
        failed.update((job, problem) for job, problem in outcome.failed if job not in failed)
        blocks.update(outcome.blocks)
        for job, counter in outcome.counters:
            if job in counters:
                counters[job].merge(counter)
            else:
                counters[job] = counter
            left[job] -= 1
            if not left[job]:
                tallies[job] = counters.pop(job).finish()
        progress.step()
    _hand_out(work, tensors, tallies, failed, blocks, result)
    return result


def _hand_out(
    work: Plan,
    tensors: Sequence[TensorEntry],
    tallies: Mapping[Job, Tally],
    failed: Mapping[Job, Problem],
    blocks: Mapping[Job, int],
    result: Measured,
) -> None:
    """Put the tallies of the jobs together to those of the tensors."""
    told: set[tuple[str, str]] = set()
    for at, parts in work.parts.items():
        entry = tensors[at]
        problem = next((failed[part.job] for part in parts if part.job in failed), None)
        if problem is not None:
            result.unreadable[at] = problem.message
            if (problem.file, problem.message) not in told:
                told.add((problem.file, problem.message))
                result.problems.append(
                    Problem(
                        rule=problem.rule,
                        severity=problem.severity,
                        message=problem.message,
                        file=problem.file,
                        tensor=entry.name,
                        evidence=problem.evidence,
                    )
                )
            continue
        tally = combined([(tallies[part.job], part.times) for part in parts]) if parts else Tally(elements=0)
        result.tallies[at] = negated(tally) if entry.negate else tally
        if blocks_dtype(entry):
            result.bad_blocks[at] = sum(blocks.get(part.job, 0) for part in parts)


def _segments_left(tasks: Sequence[Sequence[_Unit]]) -> dict[Job, int]:
    left: dict[Job, int] = {}
    for task in tasks:
        for unit in task:
            for job, _, _ in unit.jobs:
                left[job] = left.get(job, 0) + 1
    return left


def _tasks(work: Plan, storages: Mapping[str, Storage], check: bool) -> list[list[_Unit]]:
    """Cut the jobs into tasks of bounded size, in the order of the jobs."""
    by_storage: dict[str, list[Range]] = {}
    for job in work.jobs:
        if isinstance(job, Range) and _is_whole(storages[job.storage], check):
            by_storage.setdefault(job.storage, []).append(job)
    tasks: list[list[_Unit]] = []
    pending: list[_Unit] = []
    waiting = 0

    def flush() -> None:
        nonlocal pending, waiting
        if pending:
            tasks.append(pending)
        pending, waiting = [], 0

    done: set[str] = set()
    for job in work.jobs:
        storage = storages[job.storage]
        if isinstance(job, Block):
            flush()
            tasks.append([_Unit(job.storage, ((job, 0, 0),))])
            continue
        if job.storage in by_storage:
            if job.storage in done:
                continue
            done.add(job.storage)
            ranges = sorted(by_storage[job.storage], key=lambda found: found.start)
            unit, size = _Unit(job.storage, tuple((r, 0, r.length) for r in ranges), True), storage.size
        elif job.length > _SEGMENT and job.dtype in BITS:
            flush()
            for begin in range(0, job.length, _SEGMENT):
                tasks.append([_Unit(job.storage, ((job, begin, min(_SEGMENT, job.length - begin)),))])
            continue
        else:
            unit, size = _Unit(job.storage, ((job, 0, job.length),)), job.length
        pending.append(unit)
        waiting += size
        if waiting >= _TASK:
            flush()
    flush()
    return tasks


def _is_whole(storage: Storage, check: bool) -> bool:
    if not is_random_access(storage):
        return True
    return check and any(extent.crc32 is not None for extent in storage.extents)


class _Runner:
    """Runs tasks in the threads of a pool; each thread has its own buffer and open files."""

    def __init__(
        self, storages: Mapping[str, Storage], casts: Sequence[NumberFormat], *, check: bool, kernels: Kernels | None
    ) -> None:
        self._storages = storages
        self._casts = tuple(casts)
        self._check = check
        self._kernels = kernels
        self._local = threading.local()
        self._all_files: list[Files] = []

    def close(self) -> None:
        """Close every file."""
        for files in self._all_files:
            files.close()

    def __call__(self, task: Sequence[_Unit]) -> _Outcome:
        outcome = _Outcome()
        for unit in task:
            try:
                self._unit(unit, outcome)
            except Damage as damage:
                outcome.failed.extend((job, damage.problem) for job, _, _ in unit.jobs)
            except OSError as error:
                storage = self._storages[unit.storage]
                file = error.filename or (storage.extents[0].file if storage.extents else "?")
                problem = Problem(
                    rule="corrupt-file",
                    severity="error",
                    message=f"it cannot be read: {error.strerror or error}",
                    file=str(file),
                )
                outcome.failed.extend((job, problem) for job, _, _ in unit.jobs)
        return outcome

    def _thread(self) -> tuple[Files, Any]:
        if not hasattr(self._local, "files"):
            self._local.files = Files()
            self._all_files.append(self._local.files)
            self._local.buffer = np.empty(CHUNK, np.uint8)
        return self._local.files, self._local.buffer

    def _unit(self, unit: _Unit, outcome: _Outcome) -> None:
        storage = self._storages[unit.storage]
        if unit.whole:
            self._stream(unit, storage, outcome)
            return
        files, buffer = self._thread()
        for job, begin, length in unit.jobs:
            if isinstance(job, Block):
                counter = Counter(job.dtype, self._casts, storage.byteorder)
                for values in strided_chunks(files, storage, job, check=self._check):
                    counter.feed(values.view(np.uint8), self._kernels)
                    outcome.read += values.nbytes
            elif job.dtype not in BITS:
                counter, bad = count_blocks(_pieces(files, storage, job, buffer), job.dtype, self._casts, self._kernels)
                outcome.blocks.append((job, bad))
                outcome.read += length
            else:
                counter = Counter(job.dtype, self._casts, storage.byteorder)
                for position in range(begin, begin + length, buffer.size):
                    into = buffer[: min(buffer.size, begin + length - position)]
                    read_range(files, storage, job.start + position, into)
                    counter.feed(into, self._kernels)
                outcome.read += length
            outcome.counters.append((job, counter))

    def _stream(self, unit: _Unit, storage: Storage, outcome: _Outcome) -> None:
        """Count ranges while their storage goes by; a wrong CRC at the end leaves the counts and says so."""
        files, buffer = self._thread()
        counters: list[Any] = [Counter(job.dtype, self._casts, storage.byteorder) for job, _, _ in unit.jobs]
        rests: list[Any] = [b""] * len(counters)
        position = 0
        try:
            for chunk in stream_whole(files, storage, buffer, check=self._check, kernels=self._kernels):
                for at, (job, _, length) in enumerate(unit.jobs):
                    assert isinstance(job, Range)
                    begin, end = max(job.start - position, 0), min(job.start + length - position, chunk.size)
                    if begin < end:
                        rests[at] = _feed_whole(counters[at], chunk[begin:end], rests[at], job.dtype, self._kernels)
                position += chunk.size
        except Damage as damage:
            if position < storage.size:
                raise
            outcome.doubtful.append(damage.problem)
        if position < storage.size:
            file = storage.extents[0].file if storage.extents else "?"
            raise Damage(
                Problem(
                    rule="truncated-file",
                    severity="error",
                    message=f"its data has {position:,} of {storage.size:,} bytes",
                    file=file,
                )
            )
        outcome.read += storage.size
        outcome.counters.extend((job, counter) for (job, _, _), counter in zip(unit.jobs, counters, strict=True))


def _feed_whole(counter: Counter, part: Any, rest: bytes, dtype: str, kernels: Kernels | None) -> bytes:
    """Feed the whole elements of what was left over and ``part``; return the bytes of the element that is cut."""
    width = 3 if dtype.startswith("float6") else max(BITS[dtype] // 8, 1)
    if rest:
        part = np.concatenate((np.frombuffer(rest, np.uint8), part))
    whole = part.size // width * width
    if whole:
        counter.feed(part[:whole], kernels)
    return bytes(part[whole:])


def _pieces(files: Files, storage: Storage, job: Range, buffer: Any) -> Iterator[Any]:
    """Yield the bytes of a range in runs of at most one buffer."""
    for position in range(0, job.length, buffer.size):
        into = buffer[: min(buffer.size, job.length - position)]
        read_range(files, storage, job.start + position, into)
        yield into


def _run(runner: _Runner, tasks: Sequence[Sequence[_Unit]], workers: int) -> Iterator[_Outcome]:
    """Yield the outcomes of the tasks as they come; a few are handed out ahead, so that memory stays bounded."""
    try:
        if len(tasks) <= 1 or workers == 1:
            for task in tasks:
                yield runner(task)
            return
        with ThreadPoolExecutor(workers, thread_name_prefix="nanprobe-scan") as pool:
            rest = iter(tasks)
            running: set[Future[_Outcome]] = set()
            try:
                while True:
                    running.update(pool.submit(runner, task) for task in islice(rest, workers * _QUEUED - len(running)))
                    if not running:
                        return
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            finally:
                for future in running:
                    future.cancel()
    finally:
        runner.close()
