"""What can be wrong with a saved batch by itself, and how a replay shows it."""

from __future__ import annotations

from nanprobe.catalogue.entry import Entry, Family, Reference

__all__ = ["BATCH"]

BATCH = Family(
    title="A batch by itself",
    about=(
        "Names for what is wrong with a saved batch before any model sees it. No command of this version looks at a "
        "batch alone; each entry says how a replay shows it."
    ),
    entries=(
        Entry(
            name="out-of-vocabulary",
            kind="rule",
            meaning="an id is negative or not below the size of the table it indexes",
            what="An embedding or a loss is indexed beyond its rows, so that the forward pass cannot be run.",
            why=(
                "Tokens were added to the tokenizer and the embedding was not resized, a pad id lies outside the "
                "table, the batch was made with another tokenizer, or -100 went in with the ids and not the labels."
            ),
            looks_like=(
                "A replay ends with exit code 2 and names the field, the id and the range. On a GPU the same is a "
                "device-side assertion, reported at some later operation."
            ),
            what_to_try=(
                "Compare the largest id with `num_embeddings`, and resize the embedding after adding tokens.",
                "Check that the tokenizer is the one that the checkpoint was trained with.",
            ),
            what_not_to_try=(
                "Clamping the ids: the model then reads another token.",
                "Looking for the fault at the operation that a GPU names: it is reported late.",
            ),
            references=(
                Reference(issue="huggingface/transformers#12763", says="added tokens without a resized embedding"),
                Reference(issue="meta-llama/llama3#276", says="special tokens with ids beyond the vocabulary size"),
            ),
            related=("long-sequence", "nonfinite-input"),
        ),
        Entry(
            name="empty-mask",
            kind="rule",
            meaning="a mask excludes everything in a sample",
            what="A sample's attention or loss mask has no position left, so attention or a mean has nothing to use.",
            why=(
                "An empty text, a prompt that fills the whole length so that nothing is left of the completion, a "
                "window of the data that holds padding only, or a mask with its meaning turned round."
            ),
            looks_like=(
                "In a replay: `masked-row` at a softmax, or `domain-error` or `empty-reduction` at the mean over the "
                "mask, with the sample; FP32 fails as well."
            ),
            what_to_try=(
                "Drop such samples where batches are made.",
                "Divide by `mask.sum().clamp(min=1)`, and let attention return zeros for such rows.",
            ),
            what_not_to_try=(
                "Another precision: no precision has a mean of nothing.",
                "Unmasking the first position without saying so: the model then learns from padding.",
            ),
            references=(
                Reference(issue="huggingface/trl#1033", says="a masked mean over a completion without tokens"),
                Reference(issue="pytorch/pytorch#41508", says="attention over keys that are all masked"),
            ),
            related=("masked-row", "empty-reduction", "all-labels-ignored"),
        ),
        Entry(
            name="all-labels-ignored",
            kind="rule",
            meaning="every label is the ignore index",
            what="The loss averages over no label: cross entropy returns NaN, and its gradient may still be zero.",
            why=(
                "Truncation removed the answer and kept the prompt, a template did not match so that everything was "
                "masked, or a micro-batch happens to hold only such samples."
            ),
            looks_like=(
                "In a replay: `empty-reduction` in the loss, with FP32 failing as well, while the gradients may all "
                "be finite."
            ),
            what_to_try=(
                "Count the labels that are not ignored, and drop samples without any.",
                "Average over the labels of the whole step, with `reduction='sum'` and one division.",
            ),
            what_not_to_try=(
                "Skipping steps whose loss is NaN without counting them: the data problem stays.",
                "Lowering the learning rate: the loss is undefined, not large.",
            ),
            references=(
                Reference(issue="pytorch/pytorch#70348", says="cross entropy is NaN when every target is ignored"),
                Reference(issue="pytorch/pytorch#75181", says="the same, asked for as a change of behaviour"),
            ),
            related=("empty-reduction", "empty-mask"),
        ),
        Entry(
            name="long-sequence",
            kind="rule",
            meaning="a sequence is longer than the model has positions for",
            what=(
                "Positions run beyond the table of learned positions, or beyond the length that rotary or relative "
                "positions were trained for."
            ),
            why="Truncation was off, two segments were joined, or special tokens came on top of the full length.",
            looks_like=(
                "With a table of positions a replay ends with exit code 2 and names the range. Without one it runs, "
                "and `divergence` or `overflow` may show at the late positions only."
            ),
            what_to_try=(
                "Truncate to the model's length, special tokens counted.",
                "Look whether the bad elements of the report all stand at late positions.",
            ),
            what_not_to_try=("Enlarging the position table at random: untrained positions are noise.",),
            references=(
                Reference(issue="facebookresearch/esm#49", says="an index error on CPU, a poisoned process on a GPU"),
                Reference(issue="facebookresearch/fairseq#2260", says="NaN from the one sequence above the old length"),
            ),
            related=("out-of-vocabulary", "unrepresentable-constant"),
        ),
        Entry(
            name="repeated-pattern",
            kind="rule",
            meaning="a sample consists of one short pattern over and over",
            what="One token, or a short run of tokens, fills most of a sample.",
            why="Scraped pages, failed conversions, padding that is not masked, a generator that got stuck.",
            looks_like=(
                "Nothing is non-finite by it alone. In a replay such a sample stands out as the only one among "
                "`samples` of an overflow, or by gradients far larger than the others'."
            ),
            what_to_try=(
                "Look at the samples that the report names, decoded.",
                "Filter by compression ratio or by the number of distinct tokens.",
            ),
            what_not_to_try=("Clipping harder without a look at the data: the sample comes again in the next epoch.",),
            references=(
                Reference(
                    issue="stanford-crfm/mistral#115",
                    says="loss spikes, with batches of garbage as one hypothesis",
                ),
                Reference(issue="stas00/ml-engineering#32", says="spikes that are answered by skipping the data"),
            ),
            related=("duplicate-sample", "value-outlier"),
        ),
        Entry(
            name="value-outlier",
            kind="rule",
            meaning="a few values of a field are far beyond the rest",
            what="The largest magnitude of a floating field is many times what nearly all of its values stay below.",
            why="A broken sensor, a unit that was mixed up, a feature that was never normalised, a division by near 0.",
            looks_like=(
                "In a replay: `overflow` in the first layer or at the cast of the field, with the sample; the "
                "normalisation after it may keep the damage in its running statistics."
            ),
            what_to_try=(
                "Normalise or clip the field where batches are made.",
                "Keep the first layer in FP32 while the data is mended.",
            ),
            what_not_to_try=("Loss scaling: it acts on gradients, the input overflows before.",),
            references=(
                Reference(issue="zhouhaoyi/Informer2020#251", says="NaN loss for inputs in the ten thousands"),
                Reference(issue="pytorch/pytorch#115500", says="large inputs that become Inf by the cast to fp16"),
            ),
            related=("overflow", "cast-overflow", "nonfinite-input"),
        ),
        Entry(
            name="rounded-integer",
            kind="rule",
            meaning="a floating field holds integers that this format would round",
            what=(
                "Ids, positions or timesteps are stored as floats and lie above the largest integer up to which the "
                "format is exact: 256 in bf16, 2048 in fp16."
            ),
            why="The whole batch was cast to the model's dtype, integers in disguise included.",
            looks_like=(
                "In a replay with `mode: cast`: `unrepresentable-constant` in phase `input`, with the field and the "
                "number of values that change."
            ),
            what_to_try=(
                "Keep such fields as integers, or in FP32 up to the end of the embedding.",
                "Cast the field that needs it and not the whole batch.",
            ),
            what_not_to_try=("Taking fp16 in place of bf16: its integers end at 2048.",),
            references=(
                Reference(issue="modelscope/DiffSynth-Studio#562", says="timesteps that bf16 rounds to other steps"),
                Reference(issue="Nerogar/OneTrainer#1177", says="text ids that bf16 mixes up"),
            ),
            related=("unrepresentable-constant", "cast-overflow"),
        ),
        Entry(
            name="constant-sample",
            kind="rule",
            meaning="all values of a sample are the same",
            what="A sample has no variance: silence, a blank image, a dead channel.",
            why="Empty recordings and images, padding as a sample of its own, a decoder that failed quietly.",
            looks_like=(
                "In a replay: `domain-error` where a deviation of zero divides, or `underflow` where the eps beside "
                "it is zero in this format; in backward a square root at zero."
            ),
            what_to_try=(
                "Drop such samples, or normalise with an eps that the format can represent.",
                "Put the eps inside the square root.",
            ),
            what_not_to_try=("`nan_to_num` after the normalisation: its gradient is NaN all the same.",),
            references=(
                Reference(issue="maxrmorrison/torchcrepe#5", says="NaN in silent regions from the normalisation"),
                Reference(issue="Project-MONAI/MONAI#1092", says="a deviation of zero for a blank image"),
            ),
            related=("domain-error", "underflow", "empty-reduction"),
        ),
        Entry(
            name="duplicate-sample",
            kind="rule",
            meaning="two samples of the batch are the same",
            what="Two rows agree in every field, so that one counts twice or stands as its own counter-example.",
            why="A sampler with replacement, a dataset with copies, ranks that were given the same seed.",
            looks_like=(
                "Nothing is non-finite by it alone. A contrastive loss pulls and pushes the same pair, and a distance "
                "of exactly zero has no gradient: `domain-error` in backward, at the two samples."
            ),
            what_to_try=(
                "Sample without replacement, and give every rank its own seed.",
                "For in-batch negatives, take a sampler that leaves duplicates out.",
            ),
            what_not_to_try=("Adding noise to tell them apart.",),
            references=(
                Reference(
                    issue="huggingface/sentence-transformers#3189",
                    says="the same text as positive and as in-batch negative",
                ),
                Reference(issue="fartashf/vsepp#6", says="one image twice in a batch, and then as its own negative"),
            ),
            related=("repeated-pattern", "domain-error"),
        ),
        Entry(
            name="unequal-batch",
            kind="rule",
            meaning="the fields of a batch disagree about how many samples there are",
            what="The batch dimension differs between fields, so that broadcasting pairs samples with strangers.",
            why="A last batch that one code path fills up, a field that was flattened, samples dropped in one field.",
            looks_like=(
                "A replay either ends with exit code 2 and the shapes that do not fit, or runs on a loss that was "
                "broadcast; `samples` is then null where no dimension can be tied to the batch."
            ),
            what_to_try=(
                "Compare the first dimensions of all fields, and set `batch: {dim: N}` where it is another.",
                "Read warnings about a target size that differs from the input size.",
            ),
            what_not_to_try=("Reshaping until the loss runs.",),
            references=(
                Reference(issue="xinge008/Cylinder3D#58", says="a last batch that is smaller than the labels say"),
                Reference(issue="aigc-apps/VideoX-Fun#263", says="a target that broadcasts against the prediction"),
            ),
            related=("empty-mask", "duplicate-sample"),
        ),
    ),
)
"""A batch by itself."""
