"""Operations outside their domain, on infinities, on nothing, and masked values that come back."""

from __future__ import annotations

from nanprobe.catalogue.entry import Entry, Family, Reference

__all__ = ["OPERATIONS"]

OPERATIONS = Family(
    title="Operations that have no result",
    about="Operations outside their domain, on infinities, on nothing, and masked values that come back.",
    entries=(
        Entry(
            name="domain-error",
            kind="mechanism",
            meaning="a function outside its domain on finite operands",
            what=(
                "A logarithm of zero, a root of a negative number, a division by zero, an arc cosine beyond 1, a "
                "fractional power of a negative number, or a CTC alignment that cannot exist: the operands are finite "
                "and there is no finite result, in any precision."
            ),
            why=(
                "The data holds a zero vector, a silent stretch, an identical pair or an empty target; or rounding "
                "pushed an argument just over the edge (a cosine of 1.0000001). The derivative of a root at zero is "
                "infinite although the root is not."
            ),
            looks_like=(
                "`precision_related` is false and the verdict is `not-precision` when FP32 does the same; the "
                "headline says that FP32 fails too. The explanation says that FP64 has no finite result on these "
                "operands either. In phase `backward`, `op` is the forward operation whose derivative failed."
            ),
            what_to_try=(
                (
                    "Keep the argument inside the domain: clamp it to a bound away from the edge, or put eps inside "
                    "the root or logarithm."
                ),
                (
                    "Use functions that know the edge: `log_softmax`, `logsumexp`, "
                    "`binary_cross_entropy_with_logits`, `torch.linalg.norm`."
                ),
                "Look at the named samples: an empty or constant sample is often a mistake of the data.",
            ),
            what_not_to_try=(
                "Changing the precision: FP32 fails in the same place.",
                (
                    "Replacing the result afterwards by `where` or `nan_to_num`: the forward looks clean and the "
                    "gradient is still NaN."
                ),
                "Gradient clipping: an Inf norm makes every gradient zero or NaN.",
            ),
            references=(
                Reference(issue="pytorch/pytorch#2421", says="the gradient of a root of a sum of squares at zero"),
                Reference(issue="pytorch/pytorch#49844", says="binary cross-entropy with infinite logits"),
                Reference(
                    issue="photosynthesis-team/piq#308",
                    says="a gradient magnitude of a constant image, by a root of a sum of squares",
                ),
            ),
            related=(
                "masked-gradient",
                "underflow",
                "empty-reduction",
            ),
        ),
        Entry(
            name="invalid-operation",
            kind="mechanism",
            meaning="an operation on an Inf that has no result, as Inf - Inf",
            what=(
                "Inf minus Inf, zero times Inf or Inf divided by Inf is NaN. The Inf itself was legitimate, as in a "
                "mask, or has been reported already, so that this operation is the one that makes the harm."
            ),
            why=(
                "A -Inf from a mask is multiplied by a 0/1 weight, added to a +Inf, or subtracted from its own "
                "maximum; or a masked value reaches the loss, where it was never meant to be."
            ),
            looks_like=(
                "`first_bad` is the operation on the infinities. When the Inf was made by arithmetic on finite "
                "values, the report names that place instead, and this one is `propagated`."
            ),
            what_to_try=(
                (
                    "Select instead of multiplying: `where` and `masked_fill` ignore what they do not take, 0 x Inf "
                    "does not."
                ),
                "Leave masked positions out of the loss by indexing, not by a factor of zero.",
                (
                    "Fill masks with a large finite number of the scores' own type when something other than a "
                    "softmax reads them."
                ),
            ),
            what_not_to_try=(
                (
                    "Looking for the fault in a lower learning rate or a smaller loss scale: the infinities are there "
                    "by design."
                ),
                "Removing every -Inf: softmax handles them well as long as a row keeps one finite entry.",
            ),
            references=(
                Reference(issue="pytorch/pytorch#101967", says="a masked value times zero is still NaN"),
                Reference(
                    issue="onnx/onnx#8068",
                    says="a mask built as (1 - m) times -Inf is NaN where attention is allowed",
                ),
            ),
            related=(
                "masked-row",
                "overflow",
                "masked-gradient",
            ),
        ),
        Entry(
            name="masked-row",
            kind="mechanism",
            meaning="a normalisation over a row in which everything is masked",
            what=(
                "A softmax, log-softmax or masked mean runs over a row without a single allowed entry. All scores are "
                "-Inf, their sum of exponentials is zero, and the row is NaN in every precision."
            ),
            why=(
                "Left padding under a causal mask, a sample that is padding only, a window without a key, or two "
                "masks that together leave nothing. `scaled_dot_product_attention` has returned zeros for such rows "
                "since PyTorch 2.5; hand-written attention and `MultiheadAttention` with weights have not."
            ),
            looks_like=(
                "`first_bad` is the softmax, with the number of masked rows, the `samples` and, usually, "
                "`precision_related` false. If an addition to a finite mask overflowed the row to -Inf, the origin is "
                "that addition and the softmax is `propagated`."
            ),
            what_to_try=(
                "Let every row see one key, for instance itself, and drop the row afterwards.",
                "Fill with a finite minimum of the scores' type instead of -Inf, so that the row becomes uniform.",
                "Use `scaled_dot_product_attention`, and drop samples without a valid token.",
            ),
            what_not_to_try=(
                (
                    "Masking the row out of the loss: zero times NaN is NaN, and the gradients of keys and values are "
                    "NaN for all rows."
                ),
                "`nan_to_num` behind the softmax: the derivative of the softmax is still NaN.",
                "Another precision or a lower learning rate: FP32 has the same row.",
            ),
            references=(
                Reference(
                    issue="pytorch/pytorch#41508",
                    says="`MultiheadAttention` gives NaN for samples that are masked throughout",
                ),
                Reference(issue="pytorch/pytorch#103963", says="attention over a row without keys"),
                Reference(
                    issue="pytorch/pytorch#42323",
                    says="NaN of one sample poisons the gradient of shared projections",
                ),
            ),
            related=(
                "unrepresentable-constant",
                "empty-reduction",
                "masked-gradient",
            ),
        ),
        Entry(
            name="masked-gradient",
            kind="mechanism",
            meaning="a gradient of 0 x Inf or NaN from a branch that the forward pass masked out",
            what=(
                "The forward pass is clean because `where`, a clamp or a factor of zero hides a bad value. Backward "
                "still differentiates the hidden branch: its derivative is infinite, the gradient that arrives is "
                "zero, and 0 x Inf is NaN."
            ),
            why=(
                "`torch.where(x > 0, x.sqrt(), 0)` computes both branches. The same happens with `log`, `exp` of a "
                "large log-ratio that is clamped afterwards, fractional powers at zero, and losses that are "
                "multiplied by a mask."
            ),
            looks_like=(
                "Loss and forward are finite, phase is `backward`, and the report names the forward operation and its "
                "module with `backward_op`. The explanation says that what arrives there is zero. FP32 has it too "
                "unless the hidden Inf is an overflow."
            ),
            what_to_try=(
                (
                    "Make the hidden branch safe first: select a harmless argument, apply the function, then select "
                    "the result."
                ),
                "Clamp the argument before `exp`, `log` or `sqrt`, not the result behind it.",
                "Index the valid elements instead of multiplying by a mask.",
            ),
            what_not_to_try=(
                "`nan_to_num` in the forward pass: its input's derivative is still infinite.",
                (
                    "Trusting `detect_anomaly` to name the cause: it names the operation that turned NaN, and not the "
                    "mask that sent the zero."
                ),
                "Gradient clipping or skipping the step: it comes back with the next batch that has such an element.",
            ),
            references=(
                Reference(
                    issue="pytorch/pytorch#68425",
                    says="the branch that `where` does not take makes the gradient NaN",
                ),
                Reference(issue="pytorch/pytorch#52248", says="the same with a root"),
                Reference(issue="OpenRLHF/OpenRLHF#1293", says="an exponential of a log-ratio, clamped too late"),
                Reference(
                    issue="pytorch/pytorch#22820",
                    says="a relative error of 0 / 0 is left out of the loss and comes back in the gradient",
                ),
                Reference(issue="kornia/kornia#367", says="a division inside `where` that is not taken"),
            ),
            related=(
                "domain-error",
                "invalid-operation",
                "masked-row",
            ),
        ),
        Entry(
            name="empty-reduction",
            kind="mechanism",
            meaning="a reduction over no elements, or a deviation of a single one",
            what=(
                "A mean divides by the number of elements, a standard deviation by one less. Over nothing, or over "
                "one element, that is 0 / 0, and the result is NaN in every precision."
            ),
            why=(
                "All labels of a micro-batch are `ignore_index`, a completion mask is empty because the prompt fills "
                "the sequence, a group has one member, or the last batch of an epoch has a single sample."
            ),
            looks_like=(
                "Phase `loss` or a normalisation, mechanism `empty-reduction`, `precision_related` false. The "
                "gradients may be finite zeros although the loss is NaN: the report judges loss and gradients "
                "separately."
            ),
            what_to_try=(
                "Divide by the count clamped to at least one: `mask.sum().clamp(min=1)`.",
                "Leave out micro-batches without a valid label, in every process of a distributed run alike.",
                "Pass `correction=0` to `std`, or skip groups of one.",
            ),
            what_not_to_try=(
                (
                    "Ignoring it because the gradients are finite: averaged across processes or into a running loss "
                    "it spreads."
                ),
                "Blaming fp16: FP32 divides by the same zero.",
                "Truncating longer prompts harder: the labels are what is cut off.",
            ),
            references=(
                Reference(issue="pytorch/pytorch#70348", says="cross-entropy with every label ignored"),
                Reference(issue="pytorch/pytorch#75181", says="the same question for the mean reduction"),
                Reference(issue="huggingface/trl#1033", says="a mean over an empty completion mask"),
            ),
            related=(
                "masked-row",
                "domain-error",
                "nonfinite-input",
            ),
        ),
        Entry(
            name="nonfinite",
            kind="rule",
            meaning="non-finite values arise here, and the replay could not tell why",
            what=(
                "A module with finite operands gives NaN or Inf, and neither its operations nor the reference say "
                "which mechanism it was. The place is known, the reason is open."
            ),
            why=(
                "The operation was not traced (`--no-trace`), runs in a compiled or scripted part or in a custom "
                "kernel, or the gradient turned bad in a backward whose operands cannot be seen."
            ),
            looks_like=(
                "A finding with this rule, with the module, `count` and `index`, and a `mechanism` that is null. The "
                "headline says `makes NaN in` or `goes bad in` instead of `overflows in`."
            ),
            what_to_try=(
                "Replay without `--no-trace`; switch compilation off for the replay.",
                "Compare `input_absmax` with the limit of the format: close to it an overflow inside is likely.",
                "Replay the module by itself in FP32 with `keep_fp32`: if that cures it, precision is to blame.",
            ),
            what_not_to_try=(
                "Taking the module's class for the reason: a fused kernel hides several operations.",
                "Changing several things at once; the replay is deterministic, so try one at a time.",
            ),
            references=(
                Reference(
                    issue="pytorch/pytorch#109517",
                    says="an attention kernel whose backward is NaN on finite inputs",
                ),
                Reference(issue="pytorch/pytorch#182156", says="a request to be told which module made the first NaN"),
            ),
            related=(
                "overflow",
                "domain-error",
                "raised",
            ),
        ),
    ),
)
"""Operations that have no result."""
