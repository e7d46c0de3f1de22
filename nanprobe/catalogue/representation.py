"""What a number format cannot hold, and what it rounds away."""

from __future__ import annotations

from nanprobe.catalogue.entry import Entry, Family, Reference

__all__ = ["REPRESENTATION"]

REPRESENTATION = Family(
    title="Range and rounding",
    about="What a number format cannot hold, and what it rounds away.",
    entries=(
        Entry(
            name="overflow",
            kind="mechanism",
            meaning="the exact result is finite and larger than the format can hold",
            what=(
                "Every operand is finite, and the result is beyond the format's largest value, so it is stored as Inf "
                "(some 8-bit formats store their largest value instead). fp16 ends at 65504 and rounds to Inf from "
                "65520 on; bf16 reaches as far as FP32."
            ),
            why=(
                "Activations grow with depth: a feed-forward output, a gate product, a residual stream or attention "
                "scores before scaling reach 1e5 in models that were trained in bf16 or FP32, where nothing forbids "
                "it. In fp16 squares overflow above 255.9 and exp above 11.09. An Inf often becomes NaN only some "
                "operations later, which is why hooks that look for NaN blame another module."
            ),
            looks_like=(
                "The headline names precision, module and operation: `fp16 overflows in encoder.blocks.1.ff.wo "
                "(Linear): 8 of 3,072 elements are Inf where FP32 reaches 1.1e5`. `reference_absmax` is what the "
                "exact result would be, `limit` the format's largest value. Later modules are `propagated`; with "
                "`absorbed_by` the Inf turned finite again, often as a row of zeros."
            ),
            what_to_try=(
                "Run in bf16, whose range is that of FP32.",
                (
                    "Keep the named module in FP32 with `keep_fp32`; for a sum or a product between modules keep the "
                    "parent, or the residual stream."
                ),
                (
                    "Scale before multiplying: divide the query by the square root of the head size before the "
                    "product with the keys, not after."
                ),
                "Clamp right behind the operation that overflows, and check the result against FP32.",
            ),
            what_not_to_try=(
                (
                    "Lowering the learning rate: it does not cure a forward overflow; the same weights and the same "
                    "batch overflow again."
                ),
                "Lowering the loss scale or clipping gradients: the forward pass knows neither.",
                "A `.float()` inside autocast: the next matrix product casts its operands to half again.",
                "`nan_to_num` on the loss: it hides the origin and trains on what is left.",
            ),
            references=(
                Reference(
                    issue="huggingface/transformers#5651",
                    says="the output projection of T5's feed-forward block goes just beyond fp16's limit",
                ),
                Reference(
                    issue="huggingface/transformers#27179",
                    says="a gate product in one Llama layer exceeds the limit while every module around it is finite",
                ),
                Reference(
                    issue="huggingface/transformers#19229",
                    says="the residual add overflows, so that a clamp on attention scores changed nothing",
                ),
                Reference(
                    issue="pytorch/pytorch#119131",
                    says="attention scores of 7.8e5: the unfused back end fails and the fused one does not",
                ),
                Reference(
                    issue="huggingface/transformers#28673",
                    says="upcasting query and key is undone by autocast at the product",
                ),
            ),
            related=(
                "unrepresentable-constant",
                "loss-scale-overflow",
                "cast-overflow",
            ),
        ),
        Entry(
            name="underflow",
            kind="mechanism",
            meaning="a non-zero result, operand or constant became zero in this format, and something depends on it",
            what=(
                "A value that is not zero in exact arithmetic is zero in this format, and a later operation divides "
                "by it, takes its logarithm or multiplies with it. fp16 keeps nothing below 3.0e-8; an eps of 1e-8 is "
                "zero there."
            ),
            why=(
                "Constants written for FP32 (eps 1e-8 or 1e-12), squares of small values, variances of constant "
                "inputs and quotients of small probabilities fall below the smallest subnormal. What follows is a "
                "division by zero, or a branch that collapses to zeros with nothing non-finite at all."
            ),
            looks_like=(
                "Where it ends in NaN or Inf, the operation is the division, root or logarithm, and the explanation "
                "says that an operand is zero here and not in FP32. Where it stays finite it is in "
                "`first_divergence`: the output holds far more zeros than the reference's."
            ),
            what_to_try=(
                (
                    "Raise eps until it and its reciprocal fit the format: 1e-4 in fp16; better relative to the "
                    "values it protects."
                ),
                "Put eps inside the root, not behind it.",
                (
                    "Compute the normalisation, the variance or the probability in FP32; use `log_softmax` for the "
                    "logarithm of a softmax."
                ),
            ),
            what_not_to_try=(
                (
                    "Assuming that bf16 and fp16 underflow alike: bf16 has FP32's range, so 1e-8 is not zero there, "
                    "but 1 + 1e-8 is still 1."
                ),
                "Lowering the learning rate: the constant is zero at every rate.",
                "Adding eps after the division: by then the damage is done.",
            ),
            references=(
                Reference(
                    issue="pytorch/pytorch#33596",
                    says="the eps of `normalize` vanishes in half, and a zero vector is divided by zero",
                ),
                Reference(
                    issue="pytorch/pytorch#183761",
                    says=(
                        "eager code rounds a tiny variance plus eps to zero; the compiled kernel keeps FP32 in between"
                    ),
                ),
                Reference(issue="pytorch/pytorch#133085", says="RMSNorm whose squares leave the half range"),
            ),
            related=(
                "gradient-underflow",
                "absorption",
                "cast-underflow",
            ),
        ),
        Entry(
            name="absorption",
            kind="mechanism",
            meaning="an operand vanished in a sum, being below half the spacing of the other",
            what=(
                "In a sum of a large and a small number the small one is below half the distance between neighbouring "
                "values, so the sum equals the large number. bf16 has 8 significant bits: 256 + 1 is 256. fp16 has "
                "11: 2048 + 1 is 2048."
            ),
            why=(
                "Running sums, counters, means over many elements and residual streams with a few very large channels "
                "are kept in the low precision. Each step loses its increment, and the total stands still."
            ),
            looks_like=(
                "Nothing is NaN or Inf. The report's `first_divergence` names the sum or mean, and `absorbed` in the "
                "finding's evidence is the share of the smaller operand that it lacks; its relative error "
                "grows with the number of terms. A mean of ones over 4,096 elements that sums up in bf16 comes out "
                "far too small."
            ),
            what_to_try=(
                (
                    "Accumulate in FP32 and round once at the end: `sum(dtype=torch.float32)`, or the native mean and "
                    "norm, which do so."
                ),
                "Keep running losses, counters and averages in FP32 or as integers.",
                "Keep the residual stream in FP32 when a few channels dominate it.",
            ),
            what_not_to_try=(
                (
                    "Reading a logged loss that falls to a plateau as progress: the accumulator may have stopped, not "
                    "the loss."
                ),
                "Changing to fp16 for its three more bits: the same sum stalls a little later, and overflows.",
                "Summing in another order by hand: it moves the stall, it does not remove it.",
            ),
            references=(
                Reference(
                    issue="huggingface/transformers#8561",
                    says="a running loss in bf16 stops growing, and the logged value is wrong",
                ),
                Reference(
                    issue="pytorch/xla#2425",
                    says="adding to a bf16 accumulator has no effect beyond a small total",
                ),
                Reference(issue="pytorch/pytorch#43992", says="average pooling whose sum is kept in half"),
            ),
            related=(
                "update-underflow",
                "step-stalled",
                "cancellation",
            ),
        ),
        Entry(
            name="cancellation",
            kind="mechanism",
            meaning="a difference of nearly equal rounded values, mostly rounding error",
            what=(
                "Two values that agree in their leading digits are subtracted. The subtraction is exact; what is left "
                "are the digits that earlier rounding got wrong, so the relative error of the result can be anything."
            ),
            why=(
                "A variance as mean of squares minus square of the mean, a log-probability ratio of two close "
                "policies, 1 - p for p near 1, or a distance of nearby points, computed from operands that have 8 or "
                "11 significant bits."
            ),
            looks_like=(
                "Finite values, a small result, and a large relative error: `op` in `first_divergence` is the "
                "operation whose rounding the difference brought out, and `amplified_by` in the finding's evidence the "
                "difference itself, which is exact: its `rel_error` is far above its own error."
            ),
            what_to_try=(
                "Subtract first and round afterwards: compute the difference from FP32 operands.",
                (
                    "Use the form without the difference: `var` over centred values, `log1p`, `expm1`, `log_softmax`, "
                    "a norm of the difference."
                ),
                "Keep the operands' producers in FP32, not only the subtraction.",
            ),
            what_not_to_try=(
                "Upcasting at the subtraction only: its operands are rounded already.",
                "Raising the tolerance until the finding disappears, before you know what depends on the difference.",
            ),
            references=(
                Reference(
                    issue="tenstorrent/tt-metal#45968",
                    says="a batch variance as a difference of two means is wrong or NaN in bf16",
                ),
                Reference(
                    issue="pytorch/pytorch#2470",
                    says="a variance that was zero because two nearly equal numbers were subtracted",
                ),
            ),
            related=(
                "absorption",
                "divergence",
            ),
        ),
        Entry(
            name="unrepresentable-constant",
            kind="mechanism",
            meaning="a constant, mask value, id or bound that rounds to something with another meaning",
            what=(
                "A number that the code relies on does not exist in the format: -1e9 becomes -Inf in fp16, 1 - 1e-4 "
                "becomes 1 in both half formats, id 257 becomes 256 in bf16, timestep 998.39 becomes 1000."
            ),
            why=(
                "The constant, table or id was written for FP32 and is cast with everything else: mask fills, clamp "
                "bounds, smoothing terms, positions, timesteps, token ids that travel as floats, inverse frequencies "
                "of rotary embeddings in a converted buffer."
            ),
            looks_like=(
                "For a mask or a bound that becomes Inf, `first_bad` is the operation that uses it, and the module "
                "after it is `propagated`. For rounded ids and tables nothing is NaN: phase `input` or `buffer` with "
                "the count of elements that change, or `first_divergence` in the module that uses them."
            ),
            what_to_try=(
                (
                    "Take the bound from the tensor: `torch.finfo(scores.dtype).min`; or fill by `masked_fill` or "
                    "`where` instead of adding."
                ),
                "Choose clamp margins that the format can tell from 1: at least 5e-3 covers both half formats.",
                (
                    "Keep positions, timesteps and frequency tables in FP32 until after the sine and cosine; keep ids "
                    "as integers."
                ),
                (
                    "Keep such buffers out of `model.half()`: register them so that a cast leaves them alone, or name "
                    "the module in `keep_fp32`."
                ),
            ),
            what_not_to_try=(
                "Taking FP32's `finfo.min` as a mask in a half model: it is -Inf there, or raises.",
                "Adding two masks of `finfo.min`: their sum overflows in every precision.",
                "Lowering the learning rate: the constant rounds the same at every step.",
            ),
            references=(
                Reference(issue="facebookresearch/fairseq#3575", says="a fill value that half precision cannot hold"),
                Reference(
                    issue="huggingface/transformers#17433",
                    says="the smallest fp16 number plus a score below -16 is -Inf",
                ),
                Reference(
                    issue="huggingface/transformers#35332",
                    says="FP32's minimum hard-coded into a model that runs in bf16",
                ),
                Reference(issue="huggingface/transformers#25681", says="rotary tables computed in half precision"),
                Reference(
                    issue="huggingface/diffusers#9405",
                    says="timesteps that are rounded before they are embedded",
                ),
            ),
            related=(
                "overflow",
                "masked-row",
                "divergence",
            ),
        ),
    ),
)
"""Range and rounding."""
