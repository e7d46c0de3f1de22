"""Values that were bad in the batch, the weights or the buffers, or that nobody wrote."""

from __future__ import annotations

from nanprobe.catalogue.entry import Entry, Family, Reference

__all__ = ["STORED"]

STORED = Family(
    title="There before the first operation",
    about="Values that were bad in the batch, the weights or the buffers, or that nobody wrote.",
    entries=(
        Entry(
            name="nonfinite-input",
            kind="mechanism",
            meaning="the batch held it before anything ran",
            what="A field of the batch contains NaN or Inf as it was saved. No model and no precision is involved.",
            why=(
                "Missing values in a table, a division by zero in preprocessing, a normalisation of a constant "
                "sample, an empty audio clip, or a cast of large raw values to half by the data pipeline."
            ),
            looks_like=(
                "The headline says that it was in the batch before anything ran, with the field, the count, the first "
                "index and the samples; phase is `input`, `module` is null. It is an error when it reaches the loss, "
                "a gradient or the output, else a warning."
            ),
            what_to_try=(
                "Mend or drop the named samples, and find the step of the pipeline that makes them.",
                "Check batches where they are made: one `isfinite().all()` costs less than a lost run.",
                "Normalise with an eps that does not vanish for a constant sample.",
            ),
            what_not_to_try=(
                "Turning mixed precision off: FP32 is given the same values.",
                "`nan_to_num` on the batch without counting: it hides how much of the data is broken.",
            ),
            references=(
                Reference(issue="prs-eth/Marigold#111", says="training data with invalid values"),
                Reference(
                    issue="NVIDIA/Megatron-LM#780",
                    says="a NaN gradient norm that one answer traces to data of zeros",
                ),
            ),
            related=(
                "empty-reduction",
                "nonfinite-parameter",
                "nonfinite-buffer",
            ),
        ),
        Entry(
            name="nonfinite-parameter",
            kind="mechanism",
            meaning="a parameter held it before anything ran",
            what=(
                "A weight contains NaN or Inf as it was loaded, or becomes Inf only by the cast to this precision's "
                "storage type (then the mechanism is `overflow` in phase `parameter`)."
            ),
            why=(
                "The step before the checkpoint was bad and was saved all the same; the file was damaged or badly "
                "converted; or a key was missing when loading, so that memory nobody wrote stands in for it."
            ),
            looks_like=(
                "The headline says that it was in the weights before anything ran, with the parameter, count and "
                "first index. No precision is to blame, and everything downstream is `propagated`."
            ),
            what_to_try=(
                "Go back to the last checkpoint without it: `nanprobe scan-checkpoint` says which.",
                "Replay the step after that checkpoint to see the real origin.",
                "Compare with the source that the file was converted from.",
            ),
            what_not_to_try=(
                "Resuming with a lower learning rate: a NaN weight stays NaN whatever is added to it.",
                "Replacing the NaN by zeros and training on: the optimizer's moments hold it too.",
            ),
            references=(
                Reference(issue="karpathy/nanoGPT#167", says="after the loss went NaN every embedding weight was NaN"),
                Reference(issue="huggingface/diffusers#5316", says="a fused adapter whose file already held NaN"),
                Reference(
                    issue="vllm-project/vllm#53537",
                    says="nothing looks at the values when a checkpoint is loaded",
                ),
            ),
            related=(
                "nonfinite-weight",
                "nonfinite-buffer",
                "uninitialized",
            ),
        ),
        Entry(
            name="nonfinite-buffer",
            kind="mechanism",
            meaning="a buffer held it before anything ran",
            what=(
                "A buffer, such as BatchNorm's running mean or variance, contains NaN or Inf before the first "
                "operation; or the replayed step leaves one behind, which is a warning of its own."
            ),
            why=(
                "One bad batch passed through a normalisation in training mode, and the running average keeps the "
                "damage for good. A -Inf in a mask buffer is legitimate and no finding."
            ),
            looks_like=(
                "Phase `buffer` with the buffer's name and its owner. As a warning: `the step leaves buffer "
                "norm.running_mean non-finite: every later batch is spoiled until it is reset`."
            ),
            what_to_try=(
                (
                    "Reset the buffer with `reset_running_stats()` or recompute it with clean batches, and load "
                    "weights from before."
                ),
                "Find the batch that did it: the origin lies before the normalisation, often in the cast of its input.",
                "Scale inputs of 1e5 and more before the first half-precision layer.",
            ),
            what_not_to_try=(
                "Wrapping the normalisation in FP32: its input is Inf already.",
                "Continuing to train: an average never forgets a NaN.",
                (
                    "Judging by the training loss: training mode uses the batch's own statistics, evaluation shows "
                    "the damage."
                ),
            ),
            references=(
                Reference(
                    issue="pytorch/pytorch#115500",
                    says="running statistics turn NaN because an input is cast to fp16 before them",
                ),
                Reference(issue="keras-team/keras#22589", says="the same in another framework"),
            ),
            related=(
                "nonfinite-parameter",
                "ema-mismatch",
                "overflow",
            ),
        ),
        Entry(
            name="uninitialized",
            kind="mechanism",
            meaning="memory that nothing had written was read",
            what=(
                "A tensor made by `empty` is read before it is filled, so it holds whatever was in memory. Sometimes "
                "that is zeros and everything works, sometimes it is NaN."
            ),
            why=(
                "A parameter created by `torch.empty` without an initialisation, a key missing from the checkpoint, a "
                "cache read beyond what was written, an aggregation without members, a padding slot of a kernel."
            ),
            looks_like=(
                "It changes from run to run: `did not reproduce`, or values that differ between two runs of the same "
                "lane. A replay fills new memory with NaN and with zeros, and names the first operation that computes "
                "with it when only one of them ends well; a warning where the memory happened to do no harm. "
                "Under `torch.use_deterministic_algorithms(True)` PyTorch fills new memory with NaN, so that a "
                "replay names the first operation that reads it."
            ),
            what_to_try=(
                (
                    "Initialise the parameter or buffer; write `zeros` where the first read may come before the first "
                    "write."
                ),
                "Load with `strict=True` and look at the missing keys.",
                "Mask the unused part of a cache by selection: zero times NaN is NaN.",
            ),
            what_not_to_try=(
                "Repeating the run until it passes, or blaming the GPU: the fault depends on what memory held before.",
                "Multiplying unused values by zero.",
            ),
            references=(
                Reference(issue="TransformerLensOrg/TransformerLens#902", says="a weight that was never initialised"),
                Reference(issue="vllm-project/vllm#641", says="attention reads cache blocks that nothing wrote"),
                Reference(issue="huggingface/transformers#30953", says="a weight that loading left as allocated"),
            ),
            related=(
                "missing-key",
                "missing-shard",
                "nonfinite-parameter",
            ),
        ),
    ),
)
"""There before the first operation."""
