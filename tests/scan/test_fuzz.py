"""Damaged checkpoints of every kind: a scan ends with a report or one clear line, whatever was done to the bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nanprobe.errors import NanprobeError
from nanprobe.render import render
from nanprobe.scan import ScanOptions, scan
from nanprobe.serialize import from_dict, to_dict
from tests.checkpoints.mutation import Target, fixtures, mutate

CASES = 5
"""Damaged copies of each file; `make fuzz` goes on for longer."""

OPTIONS = ScanOptions(tensors=True, casts=("fp16", "fp8-e5m2"))


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> list[Target]:
    return fixtures(tmp_path_factory.mktemp("fixtures"))


def survive(path: Path) -> None:
    """Scan, render and serialise; any error that is not ours goes through."""
    try:
        report = scan([str(path)], OPTIONS)
    except NanprobeError as error:
        if "\n" in str(error):
            raise AssertionError("more than one line") from error
        return
    assert report.exit_code in (0, 1)
    assert from_dict(to_dict(report)).summary == report.summary
    assert "\x1b" not in render(report)
    assert report.summary.scanned + report.summary.skipped + report.summary.unreadable == report.summary.tensors


def test_the_fixtures_themselves_have_no_errors_in_them(targets: list[Target]) -> None:
    for path in dict.fromkeys(target.path for target in targets):
        survive(path)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("seed", range(CASES))
def test_damaged_copies(targets: list[Target], seed: int) -> None:
    for at, target in enumerate(targets):
        original = target.file.read_bytes()
        try:
            target.file.write_bytes(mutate(original, random.Random(seed * 1000 + at).randrange(1 << 30)))
            survive(target.path)
        finally:
            target.file.write_bytes(original)
