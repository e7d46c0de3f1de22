"""The mechanisms by which numbers go bad, by the names that reports use.

A mechanism answers "why"; the module and the operation answer "where". The names are part of the report's format and
never change.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["MECHANISMS"]

MECHANISMS: Mapping[str, str] = {
    "overflow": "the exact result is finite and larger than the format can hold",
    "underflow": "a non-zero result, operand or constant became zero in this format, and something depends on it",
    "absorption": "an operand vanished in a sum, being below half the spacing of the other",
    "cancellation": "a difference of nearly equal rounded values, mostly rounding error",
    "unrepresentable-constant": "a constant, mask value, id or bound that rounds to something with another meaning",
    "domain-error": "a function outside its domain on finite operands",
    "invalid-operation": "an operation on an Inf that has no result, as Inf - Inf",
    "masked-row": "a normalisation over a row in which everything is masked",
    "masked-gradient": "a gradient of 0 x Inf or NaN from a branch that the forward pass masked out",
    "empty-reduction": "a reduction over no elements, or a deviation of a single one",
    "nonfinite-input": "the batch held it before anything ran",
    "nonfinite-parameter": "a parameter held it before anything ran",
    "nonfinite-buffer": "a buffer held it before anything ran",
    "uninitialized": "memory that nothing had written was read",
    "loss-scale-overflow": "the gradient fits the format, the scaled gradient does not",
    "gradient-underflow": "gradients became zero at this loss scale",
    "update-underflow": "an optimizer update below half the spacing of the weight changes nothing",
    "optimizer-error": "the optimizer step turns finite gradients into NaN or Inf",
    "routing-flip": "a discrete choice differs from the reference's",
    "divergence": "finite values are further from the reference than the tolerance",
}
"""Name of each mechanism and what it means, in a clause."""
