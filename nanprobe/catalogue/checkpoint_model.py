"""What `scan-checkpoint` finds when names, shapes and types are compared."""

from __future__ import annotations

from nanprobe.catalogue.entry import Entry, Family, Reference

__all__ = ["CHECKPOINT_MODEL"]

CHECKPOINT_MODEL = Family(
    title="A checkpoint beside its model",
    about="What `scan-checkpoint` finds when names, shapes and types are compared.",
    entries=(
        Entry(
            name="shape-mismatch",
            kind="rule",
            meaning="a tensor has another shape than the model, the index or the other checkpoint says",
            what="The names agree and the shapes do not, so that the tensor cannot be loaded, or is loaded in part.",
            why=(
                "Another configuration (vocabulary, width, number of heads), a vocabulary that was padded or resized, "
                "weights stored transposed, ZeRO-3 placeholders of no elements that were saved as the model."
            ),
            looks_like=(
                "An error with both shapes. With `--config` against the model, in `diff-checkpoints` against the "
                "first checkpoint, in sharded files against the declared shape."
            ),
            what_to_try=(
                "Compare the configuration with the one that was trained.",
                "For a vocabulary, resize the embedding before loading.",
                "For shape [0], gather the parameters before saving, or use the tool that joins ZeRO shards.",
            ),
            what_not_to_try=(
                "`ignore_mismatched_sizes=True`: the tensor is initialised at random.",
                "Reshaping because the number of elements fits: transposed weights fit too.",
            ),
            references=(
                Reference(issue="huggingface/transformers#20082", says="exports with tensors of shape [0]"),
                Reference(issue="deepspeedai/DeepSpeed#2413", says="placeholders that are saved instead of weights"),
            ),
            related=(
                "missing-key",
                "unexpected-key",
                "dtype-mismatch",
            ),
        ),
        Entry(
            name="missing-key",
            kind="rule",
            meaning="the model has a tensor that the checkpoint lacks",
            what=(
                "A name of the model's state dict is in none of the files. Loaded without `strict`, that tensor stays "
                "as it was initialised, or uninitialised."
            ),
            why=(
                "A prefix such as `module.` or `model.` from a wrapper, another version of the model, an adapter "
                "saved alone, a shard that is not there. A missing name that is tied to one that is there is no "
                "finding."
            ),
            looks_like=(
                "A warning with the nearest name that is there. In `diff-checkpoints`: in the first checkpoint and "
                "not in the second."
            ),
            what_to_try=(
                "Strip or add the prefix; the config has `strip_prefix`.",
                "Build the model with the configuration that was trained.",
                "Load with `strict=True` and read the list.",
            ),
            what_not_to_try=(
                "`strict=False` to make the error go away: nothing then says that a layer is random.",
                "Copying another layer's weights in its place.",
            ),
            references=(
                Reference(
                    issue="torchgeo/torchgeo#4036",
                    says="a prefix that differs, and a model that stays random without a word",
                ),
                Reference(issue="safetensors/safetensors#98", says="tied tensors that are absent by design"),
                Reference(issue="huggingface/transformers#30953", says="weights that loading did not fill"),
            ),
            related=(
                "unexpected-key",
                "uninitialized",
                "missing-shard",
            ),
        ),
        Entry(
            name="unexpected-key",
            kind="rule",
            meaning="the checkpoint has a tensor that the model lacks",
            what=(
                "A stored tensor has no place in the model and is ignored on loading. Something was trained that is "
                "not used."
            ),
            why=(
                "A prefix, another version of the model, heads or adapters that the model was built without, or "
                "buffers that are no longer saved."
            ),
            looks_like=(
                "A warning with the nearest name in the model. In `diff-checkpoints`: in the second checkpoint and "
                "not in the first."
            ),
            what_to_try=(
                "Look at missing keys at the same time: a renamed layer is in both lists.",
                "Build the model with the configuration that was trained.",
            ),
            what_not_to_try=("Dropping the keys before looking: a dropped layer does not raise, it answers wrongly.",),
            references=(
                Reference(
                    issue="hexgrad/kokoro#368",
                    says="other names for weight-norm parameters, and layers that stay random",
                ),
                Reference(issue="torchgeo/torchgeo#4036", says="two sets of names without one in common"),
            ),
            related=(
                "missing-key",
                "index-mismatch",
            ),
        ),
        Entry(
            name="tied-mismatch",
            kind="rule",
            meaning="two weights that the model ties are both stored, and differ",
            what=(
                "The configuration says that input and output embedding are one tensor, and the file holds two "
                "different ones. Which is used depends on the loader."
            ),
            why=(
                "One of them was trained while the tie was broken (by a wrapper, a cast or a new head), or the file "
                "was merged from two."
            ),
            looks_like="A warning with the other name, the number of elements that differ and the largest difference.",
            what_to_try=(
                "Find out which one was trained, and save only that.",
                "Tie again after loading and after every cast, and compare the data pointers.",
                "If both were trained on purpose, set `tie_word_embeddings` to false.",
            ),
            what_not_to_try=(
                "Averaging the two.",
                "Leaving it to the loader.",
            ),
            references=(
                Reference(issue="huggingface/transformers#30202", says="a tied output layer in saved files"),
                Reference(issue="safetensors/safetensors#304", says="how shared tensors are stored"),
            ),
            related=(
                "missing-key",
                "ema-mismatch",
            ),
        ),
        Entry(
            name="dtype-mismatch",
            kind="rule",
            meaning="tensors are stored in another type than the configuration or the optimizer calls for",
            what=(
                "The configuration names one type and most weights have another; or optimizer moments are kept in "
                "half precision, where small updates are lost."
            ),
            why=(
                "A cast before saving, an optimizer that was converted with the model, a configuration copied from "
                "another export."
            ),
            looks_like=(
                "A warning: `the configuration says bfloat16, and 1,000 of 1,000 elements are stored as float32`, or "
                "the moment with its type."
            ),
            what_to_try=(
                "Convert the weights, or say in the configuration what is stored.",
                "Keep moments in FP32; saved half-precision moments cannot be restored by loading them as FP32.",
            ),
            what_not_to_try=(
                "Taking bf16 weights for fp16 or the reverse: their ranges differ by 33 orders of magnitude.",
                "Upcasting moments on load and calling it FP32 training: the lost bits stay lost.",
            ),
            references=(
                Reference(
                    issue="deepseek-ai/DeepSeek-V3#1002",
                    says="norms stored in another type than the runtime expects",
                ),
                Reference(issue="TensorAuto/OpenTau#184", says="moments in bf16 that are loaded as FP32"),
                Reference(issue="vllm-project/speculators#899", says="a whole optimizer saved in bf16"),
            ),
            related=(
                "zero-second-moment",
                "step-stalled",
                "cast-overflow",
            ),
        ),
    ),
)
"""A checkpoint beside its model."""
