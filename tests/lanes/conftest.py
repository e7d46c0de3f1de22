"""A replay that waits for itself would wait for ever: show every thread's stack and stop instead."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator

import pytest

_SECONDS = 120


@pytest.fixture(autouse=True)
def _no_deadlock() -> Iterator[None]:
    assert sys.__stderr__ is not None
    faulthandler.dump_traceback_later(_SECONDS, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    import torch

    torch.manual_seed(7)
