"""Public function names and the operations that they dispatch, so that a peer is not marked down for its vocabulary."""

from __future__ import annotations

from benchmarks.diagnosis.case import LINEAR, PRODUCT

__all__ = ["aten_names"]

_PRODUCTS = frozenset({*LINEAR, *PRODUCT})

_WORDS: dict[str, frozenset[str]] = {
    "linear": LINEAR,
    "matmul": _PRODUCTS,
    "mm": _PRODUCTS,
    "bmm": _PRODUCTS,
    "addmm": _PRODUCTS,
    "baddbmm": _PRODUCTS,
    "softmax": frozenset({"aten._softmax", "aten.softmax"}),
    "square": frozenset({"aten.pow"}),
    "truediv": frozenset({"aten.div"}),
    "divide": frozenset({"aten.div"}),
    "normalize": frozenset({"aten.div"}),
    "cosine_similarity": frozenset({"aten.div"}),
    "to": frozenset({"aten._to_copy"}),
    "half": frozenset({"aten._to_copy"}),
    "tocopy": frozenset({"aten._to_copy"}),
    "bfloat16": frozenset({"aten._to_copy"}),
    "nll_loss": frozenset({"aten.nll_loss_forward"}),
    "nllloss": frozenset({"aten.nll_loss_forward"}),
    "cross_entropy": frozenset({"aten.nll_loss_forward"}),
    "ctc_loss": frozenset({"aten._ctc_loss"}),
    "ctcloss": frozenset({"aten._ctc_loss"}),
    "batch_norm": frozenset({"aten.native_batch_norm", "aten.cudnn_batch_norm"}),
    "convolution": frozenset({"aten.convolution"}),
    "rnn_relu": frozenset({*LINEAR, "aten.add"}),
    "multi_head_attention_forward": frozenset({"aten._softmax"}),
    "indexadd": frozenset({"aten.index_add"}),
}


def aten_names(public: str) -> frozenset[str]:
    """Return the dispatched operations that a public name (``conv2d``, ``__mul__``, ``MulBackward``) can stand for."""
    bare = public.strip("_").lower()
    for prefix in ("i", "r"):
        if public.startswith(f"__{prefix}") and bare[1:] in ("add", "sub", "mul", "truediv", "matmul", "pow"):
            bare = bare[1:]
    if bare.startswith("conv"):
        bare = "convolution"
    return _WORDS.get(bare, frozenset({f"aten.{bare}"}))
