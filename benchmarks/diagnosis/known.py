"""Cases that nanprobe does not answer rightly, what it gets wrong in each, and why."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KNOWN", "Known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The questions that are answered wrongly, and the reason."""

    wrong: tuple[str, ...]
    why: str


_SAMPLES = Known(
    wrong=("samples",),
    why="the samples are those of the visit or of the loss, not of the operation that made the bad values",
)
_LEGITIMATE = Known(
    wrong=("phase", "module", "op", "mechanism"),
    why="-Inf that the model hands out on purpose is taken for the fault, not the loss that multiplies it with zero",
)
_EVERYTHING = ("phase", "module", "op", "mechanism", "precision_related")

KNOWN: dict[str, Known] = {
    "exponential_in_a_branch_not_taken-fp16-cast": Known(
        wrong=("module", "op", "mechanism"),
        why="no loss scale makes the gradients finite, and the overflow of the highest one is named first",
    ),
    "diffusion_timestep-bf16-cast": Known(
        wrong=("op",),
        why="the product after the cast rounds as much as the cast does, and the last of the two is named",
    ),
    **dict.fromkeys(
        (
            "focal_loss_with_a_clamp-fp16-autocast",
            "focal_loss_with_a_clamp-fp16-cast",
            "focal_loss_with_a_clamp-bf16-cast",
            "logarithm_of_a_softmax-fp16-cast",
            "logarithm_of_a_softmax_in_fp32-bf16-autocast",
            "entropy_of_a_target_that_is_zero-bf16-autocast",
            "log_variance_of_twelve-fp16-cast",
            "log_variance_of_ninety_two-fp16-autocast",
            "log_variance_of_ninety_two-bf16-autocast",
            "alignment_that_cannot_be-fp16-autocast",
            "alignment_that_cannot_be-bf16-cast",
            "entropy_with_an_eps_of_1e_10-fp16-cast",
            "quantised_weight_with_a_zero_row-fp16-autocast",
            "quantised_weight_with_a_zero_row-bf16-cast",
            "masked_mean_without_a_token-fp16-autocast",
            "masked_mean_without_a_token-bf16-cast",
            "mean_of_a_selection_of_nothing-fp16-cast",
        ),
        _SAMPLES,
    ),
    **dict.fromkeys(
        (
            "binary_cross_entropy_of_an_infinite_logit-fp16-autocast",
            "masked_log_probability_times_zero-bf16-autocast",
        ),
        _LEGITIMATE,
    ),
    "infinite_entry_masked_by_a_product-fp16-cast": Known(
        wrong=("op",), why="+Inf that is filled in on purpose is taken for the fault, not what it is multiplied with"
    ),
    **dict.fromkeys(
        ("cache_of_unwritten_memory-fp16-cast", "cache_of_unwritten_memory-bf16-autocast"),
        Known(wrong=("mechanism", "precision_related"), why="memory that nothing wrote is not told from a result"),
    ),
}
"""The name of a case to what is wrong; a test fails when an entry is no longer true."""
