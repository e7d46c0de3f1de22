"""What `scan-checkpoint` finds in the values of weights, buffers and averages."""

from __future__ import annotations

from nanprobe.catalogue.entry import Entry, Family, Reference

__all__ = ["CHECKPOINT_VALUES"]

CHECKPOINT_VALUES = Family(
    title="Values in a checkpoint",
    about="What `scan-checkpoint` finds in the values of weights, buffers and averages.",
    entries=(
        Entry(
            name="nonfinite-weight",
            kind="rule",
            meaning="a weight, buffer, average or quantisation scale holds NaN or Inf",
            what=(
                "At least one stored element is NaN or Inf. What is computed with it is non-finite in every precision."
            ),
            why=(
                "The run had diverged when it saved; an exporter divided by the maximum of a block of zeros; a cast "
                "to a smaller type overflowed; or the bytes were damaged. -Inf in a mask, or in a buffer of no "
                "dimensions, is not reported."
            ),
            looks_like=(
                "An error: `layers.10.attn.weight(float32[64, 64]): this weight holds 1 NaN: 1 of 4,096 elements, "
                "first at [3, 5]`. `evidence` has the counts of NaN, Inf and -Inf; in quantised formats `blocks` "
                "counts bad blocks. `diff-checkpoints` reports it where a value became non-finite."
            ),
            what_to_try=(
                "Go back to the last checkpoint without it, and replay the step after that one.",
                "For a converted file, scan the source: if that is clean the conversion is at fault.",
                "Compare the file's hash with the published one.",
            ),
            what_not_to_try=(
                "Zeroing the bad elements and carrying on: moments and averages usually hold them too.",
                "Trusting a loader that does not complain: none of the common ones looks at values.",
            ),
            references=(
                Reference(issue="vllm-project/compressed-tensors#832", says="NaN and Inf in saved quantisation scales"),
                Reference(
                    issue="ICTMCG/Make-Your-Anchor#9",
                    says="one convolution of a released model is NaN, and every image black",
                ),
                Reference(issue="NVIDIA/nvidia-resiliency-ext#349", says="shards that held NaN when they were saved"),
            ),
            related=(
                "nonfinite-parameter",
                "nonfinite-optimizer-state",
                "cast-overflow",
            ),
        ),
        Entry(
            name="cast-overflow",
            kind="rule",
            meaning="finite elements become Inf when this tensor is cast to the named format",
            what=(
                "The tensor is fine as it is stored, and has elements at or above the value from which the format "
                "rounds to Inf: 65520 for fp16."
            ),
            why=(
                "The model was trained in FP32 or bf16, where nothing keeps weights, running variances or fill "
                "constants below 65504."
            ),
            looks_like=(
                "A warning for each format of `--cast`: `1 of 4,096 elements overflow in fp16: up to 70000, limit "
                "65504`. The count comes from the format's thresholds, never from a cast."
            ),
            what_to_try=(
                "Serve or train in bf16, or keep this tensor in FP32.",
                "For a running variance or a fill constant, look at the value itself: it may be a mistake.",
                "Rescale the layer together with its neighbour when the function allows it.",
            ),
            what_not_to_try=(
                "Casting and clamping afterwards: the Inf is made by the cast.",
                "Casting an average in place while training goes on: it poisons what is saved from then on.",
            ),
            references=(
                Reference(
                    issue="ultralytics/ultralytics#24731",
                    says="an average cast to fp16 in place turned large weights into Inf",
                ),
                Reference(issue="Tencent/ncnn#5799", says="weights that act as Inf in fp16 inference"),
                Reference(
                    issue="google-ai-edge/mediapipe-samples#408",
                    says="an overflow warning while weights are converted to fp16",
                ),
                Reference(issue="apple/coreai-torch#54", says="a running variance beyond 65504"),
            ),
            related=(
                "overflow",
                "near-limit",
                "cast-underflow",
            ),
        ),
        Entry(
            name="cast-underflow",
            kind="rule",
            meaning="non-zero elements become zero when this tensor is cast to the named format",
            what=(
                "Elements of small magnitude are flushed: 3.0e-8 and below in fp16. A few are normal; a large share "
                "changes what the layer computes."
            ),
            why=(
                "Weights that were regularised towards zero, products of low-rank factors, tiny scales, or a format "
                "of 8 bits that is meant to be used with a scale."
            ),
            looks_like=(
                "A warning from 1 % of the non-zero elements on in a 16-bit format and from 10 % on in one of 8 bits; "
                "fewer give a note. The message has the count and the threshold."
            ),
            what_to_try=(
                "Keep the tensor in FP32, or use bf16, which keeps all but the tiniest.",
                "For 8-bit formats, scale per row or block before the cast.",
                "Compare outputs of the cast model with the original on real data.",
            ),
            what_not_to_try=(
                "Judging by the count alone: zeros in a pruned layer do no harm.",
                "Casting optimizer state: second moments are squares and are flushed first.",
            ),
            references=(
                Reference(issue="ultralytics/ultralytics#24085", says="second moments saved in fp16 became zero"),
            ),
            related=(
                "underflow",
                "zero-second-moment",
                "cast-overflow",
            ),
        ),
        Entry(
            name="near-limit",
            kind="rule",
            meaning="the largest magnitude is above half of what the format can hold",
            what="The cast still works, and one doubling of this weight, or of a product with it, overflows.",
            why=(
                "Weights grow during training, and nothing in FP32 or bf16 holds them back; fp16's limit is closer "
                "than most people think."
            ),
            looks_like=(
                "A warning with the share of the limit that is used: `its largest magnitude, 51200, is 78% of what "
                "fp16 can hold`. Tensors that were quantised to fill their format are left out."
            ),
            what_to_try=(
                "Watch the tensor over several checkpoints with `diff-checkpoints`.",
                "Keep it in FP32, or train in bf16.",
                "Add weight decay to it if growth is not wanted.",
            ),
            what_not_to_try=("Ignoring activations: a weight of half the limit overflows with any input above two.",),
            references=(
                Reference(
                    issue="huggingface/transformers#10956",
                    says="weights that people edit so that they fit fp16",
                ),
                Reference(
                    issue="huggingface/transformers#5651",
                    says="a model that passes the limit only for some inputs",
                ),
            ),
            related=(
                "cast-overflow",
                "overflow",
                "outlier",
            ),
        ),
        Entry(
            name="subnormal",
            kind="rule",
            meaning="half or more of the non-zero elements are subnormal in the stored type",
            what=(
                "Nearly all values are closer to zero than the smallest normal number of their type. Training does "
                "not make such tensors."
            ),
            why=(
                "Bytes were written that are no floating-point numbers, or belong to another type; or a failed write "
                "left a counter or an address pattern behind. There is no NaN to find."
            ),
            looks_like="A warning with count and largest magnitude: values of about 1e-42 in a float32 tensor.",
            what_to_try=(
                "Compare the tensor with the checkpoint or export before.",
                "Check the file's hash, and the type that the header names.",
                "Save again and scan what was written.",
            ),
            what_not_to_try=(
                "Multiplying the values up: there is nothing in them.",
                "Looking for a vanishing gradient: weights do not get there by training.",
            ),
            references=(
                Reference(
                    issue="NVIDIA/Megatron-LM#1570",
                    says="an output layer that is sometimes written as values near 1e-42",
                ),
            ),
            related=(
                "all-zero",
                "corrupt-file",
                "outlier",
            ),
        ),
        Entry(
            name="all-zero",
            kind="rule",
            meaning="a whole weight matrix, or a quantisation scale, is zero",
            what=(
                "Every element of a matrix is zero, so its output is zero whatever goes in; or a quantisation scale "
                "is zero, and what it scales is lost."
            ),
            why=(
                "A write that stopped early, a sparse file that was copied without its holes, a tensor that was never "
                "initialised or never trained. Biases, norms, LoRA B and zero-initialised projections are zero by "
                "design and not reported."
            ),
            looks_like=(
                "A warning with the number of elements. For scales: `quantisation scales are zero: 4 of 512 elements; "
                "what they scale is lost`."
            ),
            what_to_try=(
                "Compare with the source, and check the file's hash and size on disk.",
                "For a scale, quantise again with a floor: a block of zeros wants a scale of one.",
                "If the layer really is untrained, leave it out of the file.",
            ),
            what_not_to_try=(
                "Waiting for training to fill it: two factors that are both zero have no gradient.",
                "Dividing by the largest magnitude without a floor: that is how scales become NaN.",
            ),
            references=(
                Reference(issue="microsoft/BitNet#608", says="released files with tensors of zeros"),
                Reference(issue="paiml/aprender#2337", says="a file of the right size with 27 empty tensors"),
                Reference(issue="pytorch/ao#4713", says="a quantisation scale of zero divides zero by zero"),
            ),
            related=(
                "constant",
                "dead-rows",
                "truncated-file",
            ),
        ),
        Entry(
            name="constant",
            kind="rule",
            meaning="a whole weight matrix has one and the same value",
            what=(
                "All elements are equal and not zero. Rows and columns cannot be told apart, and gradients keep them "
                "equal."
            ),
            why=(
                "An initialisation with `ones` or a fill value that was meant for a scale, a debugging leftover, or a "
                "file that holds a pattern instead of numbers."
            ),
            looks_like="A warning with the value: `all 4,096 elements are 0.02`.",
            what_to_try=(
                "Check the initialisation of the named module, and that the optimizer has its parameters.",
                "Compare with an earlier checkpoint.",
            ),
            what_not_to_try=("Training longer: the symmetry does not break by itself.",),
            references=(
                Reference(
                    issue="paiml/aprender#2337",
                    says="tensors that hold nothing but zeros in a file of full size",
                ),
            ),
            related=(
                "all-zero",
                "dead-rows",
            ),
        ),
        Entry(
            name="outlier",
            kind="rule",
            meaning="one element is a hundred times what 99.9 % of its tensor stay below",
            what=(
                "A single value stands far outside the others. Trained language models reach ratios of about 40; a "
                "flipped exponent bit makes 1e4 and more."
            ),
            why=(
                "A flipped bit in memory, on the wire or on disk, a bad step that hit one element, or a channel that "
                "really is that large."
            ),
            looks_like="A warning with the value, its index and the ratio to the 99.9 % quantile.",
            what_to_try=(
                "Compare with an earlier checkpoint: `diff-checkpoints` shows whether it jumped.",
                "Check the file's hash, and the memory of the machine that wrote it.",
                "If it has grown slowly, keep the tensor in FP32 and quantise it by channel.",
            ),
            what_not_to_try=(
                "Clipping it away unseen: some models depend on single large channels.",
                "Quantising with one scale per tensor: the outlier takes all the resolution.",
            ),
            references=(
                Reference(
                    issue="vllm-project/vllm#53537",
                    says="a shard with the wrong hash that was loaded without a word",
                ),
            ),
            related=(
                "near-limit",
                "corrupt-file",
                "subnormal",
            ),
        ),
        Entry(
            name="dead-rows",
            kind="rule",
            meaning="rows or columns of a matrix are zero throughout",
            what="Some units of a layer have no weights: they put out a constant, or nothing listens to their input.",
            why=(
                "Structured pruning, units that died behind a ReLU under weight decay, a shard that was written in "
                "part. Padding rows at the end of an embedding are no finding."
            ),
            looks_like=(
                "A warning with the number of rows and columns and the first of them: `12 of 512 rows are zero "
                "throughout`."
            ),
            what_to_try=(
                "If it was pruned, remove the rows; if not, compare with an earlier checkpoint.",
                "If the dead rows are one block at the end, suspect a partial write.",
                "Look at the share of zeros behind the activation during training.",
            ),
            what_not_to_try=("Lowering the learning rate to revive them: a dead ReLU has no gradient.",),
            references=(
                Reference(issue="osaurus-ai/vmlx-swift#217", says="short shards whose missing part reads as zeros"),
                Reference(issue="microsoft/BitNet#608", says="tensors that hold half of what their header declares"),
            ),
            related=(
                "all-zero",
                "constant",
                "truncated-file",
            ),
        ),
    ),
)
"""Values in a checkpoint."""
