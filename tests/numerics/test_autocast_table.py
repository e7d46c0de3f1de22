"""Operation by operation: the dtype under PyTorch's documented CUDA policy against ours on CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanprobe.numerics import autocast_lists, autocast_policy
from nanprobe.numerics.autocast_regions import as_on_cuda, emulate_cuda
from tests.numerics.autocast_cases import CASES, GROUPS, Case

DOCS = Path(__file__).resolve().parents[2] / "docs" / "fidelity.md"
BEGIN = "<!-- written by python -m tests.numerics.test_autocast_table -->\n"
END = "<!-- end -->"
HALVES = (torch.float16, torch.bfloat16)

NOT_ON_A_CPU = {
    "_scaled_dot_product_flash_attention",
    "_thnn_fused_gru_cell",
    "_thnn_fused_lstm_cell",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
}
"""Listed, and no CPU kernel exists that they could end in: only CUDA tensors reach them."""


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    with emulate_cuda():
        yield


def result_dtype(value: Any) -> torch.dtype:
    """Return the dtype of the first tensor in a result."""
    return value.dtype if isinstance(value, torch.Tensor) else result_dtype(value[0])


def outcomes(case: Case, way: str, half: torch.dtype) -> list[tuple[str, str]]:
    """Return (expected, found) for each choice of operand dtypes that tells something about the case's group."""
    wide = torch.float32
    operands = {
        "low": [(wide, wide), (half, half), (half, wide)],
        "float32": [(half, half), (wide, wide)],
        "widest": [(half, half), (half, wide), (wide, half)],
        "refused": [(half, half), (wide, wide)],
        "unlisted": [(half, half), (wide, wide)],
    }[case.group]
    found = []
    for first, second in operands:
        expected = {
            "low": half,
            "float32": wide,
            "widest": wide if wide in (first, second) else half,
            "refused": "refused",
            "unlisted": first,
        }[case.group]
        found.append((str(expected), run(case, way, half, first, second)))
    return found


def run(case: Case, way: str, half: torch.dtype, first: torch.dtype, second: torch.dtype) -> str:
    def maker(dtype: torch.dtype) -> Any:
        return lambda *shape: torch.randn(*shape).clamp(-2, 2).to(dtype)

    with as_on_cuda(), torch.autocast("cuda", dtype=half):
        try:
            return str(result_dtype(case.ways[way](maker(first), maker(second))))
        except RuntimeError as error:
            if "unsafe to autocast" in str(error):
                return "refused"
            raise


@pytest.mark.filterwarnings("ignore:.* is deprecated")
@pytest.mark.parametrize("half", HALVES, ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("case", "way"), [pytest.param(case, way, id=f"{case.name}-{way}") for case in CASES for way in case.ways]
)
def test_the_result_has_the_dtype_that_cuda_gives_it(case: Case, way: str, half: torch.dtype) -> None:
    for expected, found in outcomes(case, way, half):
        assert found == expected


@pytest.mark.filterwarnings("ignore:.* is deprecated")
def test_every_overload_of_the_list_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()

    def noted(before: Any) -> Any:
        def way(name: str, op: Any) -> Any:
            kernel = before(name, op)

            def noting(*args: Any, **kwargs: Any) -> Any:
                used.add(name)
                return kernel(*args, **kwargs)

            return noting

        return way

    ways = {group: noted(way) for group, way in autocast_policy._CUDA_WAYS.items()}
    monkeypatch.setattr(autocast_policy, "_CUDA_WAYS", ways)
    with contextlib.ExitStack() as stack:
        autocast_policy._register(stack)
        for case in CASES:
            for way in case.ways:
                outcomes(case, way, torch.float16)
    assert autocast_policy.listed_for_cuda() - used == NOT_ON_A_CPU
    assert autocast_policy.unknown_to_us() == ()


def test_groups_of_the_table_are_disjoint() -> None:
    groups = list(autocast_lists.GROUPS.values())
    assert len(frozenset().union(*groups)) == sum(len(group) for group in groups)


@pytest.mark.filterwarnings("ignore:.* is deprecated")
def test_documented_table_is_this_one() -> None:
    assert table() in DOCS.read_text("utf-8")


def table() -> str:
    """Return the table of ``docs/fidelity.md``: what CUDA gives, and what is given here."""
    lines = ["| operation | written as | under CUDA autocast | here, in an FP16 region |", "|---|---|---|---|"]
    for group, meaning in GROUPS.items():
        for case in (case for case in CASES if case.group == group):
            found = [seen for way in case.ways for _, seen in outcomes(case, way, torch.float16)]
            here = ", ".join(dict.fromkeys(dtype.removeprefix("torch.") for dtype in found))
            lines.append(f"| `{case.name}` | {', '.join(case.ways)} | {meaning} | {here} |")
    return "\n".join(lines)


if __name__ == "__main__":
    with emulate_cuda():
        made = table()
    text = DOCS.read_text("utf-8")
    head, rest = text.split(BEGIN)
    DOCS.write_text(head + BEGIN + made + "\n" + rest[rest.index(END) :], "utf-8")
