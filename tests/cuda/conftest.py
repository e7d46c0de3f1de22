"""Everything in this folder needs a CUDA device, and says so where there is none."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason=f"PyTorch {torch.__version__} sees no CUDA device here")
    for item in items:
        if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)
