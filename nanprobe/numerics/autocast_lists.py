"""The operations that autocast changes, by group, as PyTorch's autocast op reference has them; data only.

An overload is named as the dispatcher names it, without ``aten::``. Not every PyTorch has every overload: which of them
are in force is asked of the PyTorch at hand (:mod:`nanprobe.numerics.autocast_policy`), these tables say in which way.
Source: https://docs.pytorch.org/docs/stable/amp.html#autocast-op-reference and ``ATen/autocast_mode.h``.
"""

from __future__ import annotations

__all__ = [
    "APPEND_DTYPE",
    "CPU_LOW",
    "CPU_WIDEST",
    "FLOAT32",
    "FLOAT32_SUMS",
    "GROUPS",
    "LOW",
    "REFUSED",
    "RNN",
    "WIDEST",
    "group_of",
]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LOW = _names(
    """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
    """
)
"""Run in the region's dtype: every floating operand but float64 is cast to it."""

FLOAT32 = _names(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm
    nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss
    kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss
    triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp
    upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
    """
)
"""Run in float32: every floating operand but float64 is cast to it."""

FLOAT32_SUMS = _names(
    """
    prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int log_softmax.Dimname cumprod
    cumprod.dimname cumsum cumsum.dimname linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
    sum.dim_IntList sum.dim_DimnameList
    """
)
"""Run with ``dtype=float32`` unless the caller names a dtype; a first operand of float64 or integers is left alone."""

APPEND_DTYPE = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",
}
"""Run as another overload that takes a dtype, which is float32 unless the operand is float64."""

WIDEST = _names("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
"""Run in float32 if any operand is float32, else in the region's dtype."""

REFUSED = {
    "binary_cross_entropy": (
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
        "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
        "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
        "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
        "safe to autocast."
    )
}
"""Refused under autocast, with PyTorch's own words."""

RNN = _names("lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data")
"""Whole recurrent layers. CUDA lists the cuDNN kernel they end in, which no CPU has: cast at their own door instead."""

GROUPS: dict[str, frozenset[str]] = {
    "low": LOW,
    "float32": FLOAT32,
    "float32 sums": FLOAT32_SUMS | frozenset(APPEND_DTYPE),
    "widest": WIDEST,
    "refused": frozenset(REFUSED),
}

CPU_LOW = _names(
    """
    conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm addmm
    _addmm_activation addbmm linear _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer conv_transpose1d
    conv_transpose2d.input conv_transpose3d.input prelu scaled_dot_product_attention _native_multi_head_attention
    """
)
"""PyTorch's own list for CPUs: run in the region's dtype. What else it lists runs in float32."""

CPU_WIDEST = _names("stack cat index_copy")
"""PyTorch's own list for CPUs: widest type."""


def group_of(overload: str) -> str | None:
    """Return the key of ``GROUPS`` under which CUDA lists an overload, None for one that is left alone."""
    return next((name for name, members in GROUPS.items() if overload in members), None)
