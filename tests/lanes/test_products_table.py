"""The table of docs/fidelity.md on how far emulated products are from the double-precision product rounded once.

``python -m tests.lanes.test_products_table`` writes it. A row counts result and gradients together; what is the
remainder of a cancellation, smaller than a sixteenth of the mean magnitude, is counted apart.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanprobe.lanes import products
from tests.lanes.test_products import HALVES, OPERANDS, observed, spacings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fidelity.md"
BEGIN, END = "<!-- written by python -m tests.lanes.test_products_table -->", "<!-- end of products -->"
HEAD = (
    "| operation | format | elements | equal | one spacing off | more | more, of cancelled sums |\n"
    "|---|---|---:|---:|---:|---:|---:|\n"
)
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
# The backward of these goes through several operations that round in between.
FORWARD_ONLY = ("bilinear", "conv_tbc")
ROWS = [(name, dtype) for name in (*OPERANDS, "attention") for dtype in HALVES]


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def differences(name: str, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
    """Return elements, those that are equal, one spacing off, more than that, and more among cancelled sums."""
    torch.manual_seed(7)
    shapes: list[tuple[int, ...]]
    act: Callable[..., Any]
    act, shapes = OPERANDS[name] if name != "attention" else (attention, [(2, 2, 24, 16)] * 3)
    operands = [torch.randn(*shape).to(dtype).requires_grad_() for shape in shapes]
    doubles = [operand.detach().double().requires_grad_() for operand in operands]
    forward_only = name in FORWARD_ONLY
    with observed(dtype):
        found = act(*operands)
        downstream = torch.randn(found.shape).to(dtype)
        mine = [found] if forward_only else [found, *torch.autograd.grad(found, operands, downstream)]
    exact = act(*doubles)
    theirs = [exact] if forward_only else [exact, *torch.autograd.grad(exact, doubles, downstream.double())]
    counts = [0] * 5
    for given, wanted in zip(mine, theirs, strict=True):
        off = spacings(given.detach(), wanted.detach())
        large = wanted.abs() > wanted.abs().mean() / 16
        for slot, where in enumerate((off >= 0, off == 0, off == 1, (off > 1) & large, (off > 1) & ~large)):
            counts[slot] += int(where.sum())
    return counts[0], counts[1], counts[2], counts[3], counts[4]


def line(name: str, dtype: torch.dtype) -> str:
    elements, equal, one, more, cancelled = differences(name, dtype)
    share = [f"{100 * count / elements:.2f} %" for count in (equal, one, more, cancelled)]
    return f"| `{name}` | {NAMES[dtype]} | {elements:,} | {' | '.join(share)} |"


def documented() -> dict[tuple[str, str], list[float]]:
    table = PAGE.read_text("utf-8").split(BEGIN)[1].split(END)[0]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.strip().splitlines()[2:]]
    return {(row[0].strip("`"), row[1]): [float(cell.rstrip(" %")) for cell in row[3:]] for row in cells}


@pytest.mark.parametrize(("name", "dtype"), ROWS)
def test_each_row_is_what_comes_out(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "runs_natively", lambda dtype: False)
    elements, equal, one, more, cancelled = differences(name, dtype)
    said = documented()[name, NAMES[dtype]]
    # Another processor sums in another order: shares move a little.
    for share, count in zip(said, (equal, one, more, cancelled), strict=True):
        assert 100 * count / elements == pytest.approx(share, abs=0.5)
    if name != "attention":
        assert more == 0


def test_the_table_has_these_rows() -> None:
    assert set(documented()) == {(name, NAMES[dtype]) for name, dtype in ROWS}


if __name__ == "__main__":
    products.runs_natively = lambda dtype: False  # type: ignore[assignment]  # a writer of a table, not the product
    text = PAGE.read_text("utf-8")
    table = HEAD + "\n".join(line(name, dtype) for name, dtype in ROWS)
    PAGE.write_text(f"{text.split(BEGIN)[0]}{BEGIN}\n{table}\n{END}{text.split(END)[1]}", "utf-8")
    sys.exit(0)
