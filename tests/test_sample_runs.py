"""Every sample run prints what it is expected to print, and the comparison notices what it should."""

from __future__ import annotations

import pytest

from tests.samples import RUNS, difference, expected_of, output_of, scrubbed

VERDICTS = {
    "feed-forward-overflow": "in encoder.block.1.ff.wo (Linear), operation aten.mm: 19 of 3,072 elements are Inf",
    "gate-product-overflow": "in the own code of layers.2.mlp (GatedMLP), between up_proj and down_proj",
    "attention-scores": "fp16 overflows in blocks.1.attn.scores (RawScores)",
    "rope-drift": "bf16 drifts from FP32 in rotary_emb (RotaryEmbedding)",
    "nan-in-batch": "was already in the batch before anything ran: field x: 5 of 6,144 elements, first at [5, 1, 7, 9]",
    "healthy": "Nothing goes wrong in fp16 or bf16",
}


@pytest.mark.parametrize("name", RUNS)
def test_a_sample_run_prints_what_is_expected(name: str) -> None:
    found = difference(output_of(name), expected_of(name))
    assert found is None, found


@pytest.mark.parametrize("name", RUNS)
def test_the_expected_output_tells_the_planted_fault(name: str) -> None:
    assert VERDICTS[name] in " ".join(expected_of(name).split())
    assert expected_of(name).endswith(f"exit code {0 if name == 'healthy' else 1}\n")


OUTPUT = expected_of("feed-forward-overflow")


def test_digits_that_differ_between_processors_are_no_difference() -> None:
    assert difference(OUTPUT.replace("rel. error 1.5e-5", "rel. error 1.7e-5"), OUTPUT) is None
    assert difference(OUTPUT.replace("2.16 ", "2.17  "), OUTPUT) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("19 of 3,072", "20 of 3,072"),
        ("encoder.block.1.ff.wo", "encoder.block.1.ff.wi"),
        ("overflows", "is clean"),
        ("2.16 ", "2.36 "),
        (">>", "  "),
        ("exit code 1", "exit code 0"),
        ("bf16  clean", "bf16  goes wrong"),
    ],
)
def test_anything_else_is_a_difference(before: str, after: str) -> None:
    assert before in OUTPUT
    assert difference(OUTPUT.replace(before, after, 1), OUTPUT) is not None


def test_the_place_of_a_worst_error_is_scrubbed() -> None:
    text = scrubbed(
        "fp16  clean  rel. error at most 7.7e-4, in the gradient at h.1.ln_1; loss 4.5764 (rel. error 1.6e-6)"
    )
    assert text == "fp16 clean rel. error at most <err>, in <place>; loss 4.5764 (rel. error <err>)"


def test_gradients_are_compared_precision_by_precision() -> None:
    shared = (
        "\nGradients\n  - FP32 and bf16: all 42 parameters finite\n  - fp16: all 42 parameters non-finite\n\nCoverage:"
    )
    apart = (
        "\nGradients\n  - FP32: all 42 parameters finite\n  - fp16: all 42 parameters non-finite\n"
        "  - bf16: all 42 parameters finite; 1 of 42 parameters with elements flushed to zero (norm.bias 1 of 48)"
        "\n\nCoverage:"
    )
    assert difference(shared, apart) is None
    assert difference(shared, apart.replace("bf16: all", "bf16: 41 of")) is not None
