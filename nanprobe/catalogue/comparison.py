"""Finite differences from the reference, and what limits a comparison."""

from __future__ import annotations

from nanprobe.catalogue.entry import Entry, Family, Reference

__all__ = ["COMPARISON"]

COMPARISON = Family(
    title="Beside the reference",
    about="Finite differences from the reference, and what limits a comparison.",
    entries=(
        Entry(
            name="routing-flip",
            kind="mechanism",
            meaning="a discrete choice differs from the reference's",
            what=(
                "A top-k, an argmax, a comparison or a bucket picks something else than the reference. From there the "
                "two compute different things, and the difference is a jump, not a rounding error."
            ),
            why=(
                "Scores of experts, tokens or codes are closer to each other than the format's spacing. Ties are "
                "frequent in bf16, and each precision breaks them its own way."
            ),
            looks_like=(
                "A warning with the number of choices that differ and their total; a divergence after it carries the "
                "mechanism `routing-flip` and is attributed to it. The verdict may still be clean."
            ),
            what_to_try=(
                "Compute router logits and their softmax in FP32.",
                "Judge the model by its loss on many batches: single flips are usually harmless.",
                "If training and inference must agree, run the same precision in both, or replay the recorded choices.",
            ),
            what_not_to_try=(
                "Hunting for the first large relative error behind the flip: it is its consequence.",
                "Raising tolerances: a flip is no matter of a tolerance.",
            ),
            references=(
                Reference(issue="NVIDIA/Megatron-LM#2741", says="the type in which a router computes"),
                Reference(
                    issue="flashinfer-ai/flashinfer#2431",
                    says="routing that changes with the precision of the scores",
                ),
            ),
            related=(
                "divergence",
                "random-draws-differ",
            ),
        ),
        Entry(
            name="not-reproduced",
            kind="rule",
            meaning="the bundle says that training failed, and the replay is clean",
            what=(
                "The batch comes from a bundle that was written because its training step went bad, and no precision "
                "goes bad with it here."
            ),
            why=(
                "Something that mattered then is different now: the weights, the loss scale, random numbers, the mode, "
                "the attention back end, how a GPU sums, the optimizer step, other processes; or one GPU's kernel has "
                "a defect."
            ),
            looks_like=(
                "A warning with the reason that the bundle gives and the suspects that are left, those first that a "
                "flag can rule out. The verdict stays clean: nanprobe does not guess a module."
            ),
            what_to_try=(
                "Rule out the suspects in their order; most name the flag to try.",
                "Replay on the machine that failed, with `--device cuda`.",
                "Check that the checkpoint is of before the step and not of after it.",
            ),
            what_not_to_try=("Blaming the module with the largest error of a clean replay.",),
            references=(
                Reference(
                    issue="pytorch/pytorch#109517",
                    says="an attention kernel whose backward is NaN on finite inputs, on a GPU only",
                ),
            ),
            related=("random-draws-differ",),
        ),
        Entry(
            name="divergence",
            kind="mechanism",
            meaning="finite values are further from the reference than the tolerance",
            what=(
                "Nothing is NaN or Inf, and still the values are not what the reference computes: the relative error "
                "exceeds a tolerance that grows with the depth of the model and the coarseness of the format."
            ),
            why=(
                "A rounded table of positions or timesteps, a sum that saturates, a norm that collapses to zeros, an "
                "operation on badly conditioned operands; or simply an architecture in which errors grow faster than "
                "in most."
            ),
            looks_like=(
                "`bf16 drifts from FP32 in rotary (RotaryEmbedding): relative error 0.4, more than the 0.02 that is "
                "tolerated`. `local_error` is that of the module on the reference's own inputs: if it is large the "
                "module is at fault, if it is small the error came in from before. `op` is the operation that lost "
                "the digits, and none where the errors of many only add up."
            ),
            what_to_try=(
                "Look at the first module with a large `local_error` and keep that one in FP32.",
                "Look for integers, positions and constants that are cast with everything else.",
                "Where the architecture is known to be harmless, raise `tolerances` for that module pattern.",
            ),
            what_not_to_try=(
                "Comparing only the final loss: it is insensitive to errors that cost long-context quality.",
                "Keeping the last module in FP32: it only shows what came in.",
                "Fixed thresholds for all layers: every late layer of a deep bf16 model exceeds them.",
            ),
            references=(
                Reference(
                    issue="huggingface/transformers#29285",
                    says="rotary frequencies in half precision change long contexts",
                ),
                Reference(issue="EleutherAI/gpt-neox#1003", says="a rotary table that is cast with the model"),
                Reference(issue="pytorch/pytorch#183605", says="eager and compiled code round in different places"),
            ),
            related=(
                "absorption",
                "cancellation",
                "unrepresentable-constant",
                "routing-flip",
            ),
        ),
        Entry(
            name="raised",
            kind="rule",
            meaning="a lane ended with an exception",
            what=(
                "One precision's run of the model raised an exception, and the reference did not. The lane has no "
                "verdict; everything it did until then is in the report."
            ),
            why=(
                "An operation has no kernel for this type on this device, the model's code mixes types (`expected "
                "Half but got Float`), a fill value does not fit, or the code asserts that the loss is finite."
            ),
            looks_like=(
                "`completed` is false, `error` holds the exception and the module in which it was raised, and the "
                "verdict of that precision is `inconclusive`. The command ends with 3 only when the reference or "
                "every low precision raised."
            ),
            what_to_try=(
                "Read the module and the last operation; `--debug` shows the traceback.",
                "Replay in the mode that the run used: `autocast` and `cast` fail on different code.",
                "Keep the module in FP32 with `keep_fp32` where no kernel exists.",
            ),
            what_not_to_try=(
                "Taking it for a numerical fault: most such errors are about types.",
                "Wrapping the model's code in a `try`: the replay then tests something else.",
            ),
            references=(
                Reference(issue="pytorch/pytorch#61098", says="an operation that autocast refuses by design"),
                Reference(
                    issue="huggingface/transformers#35332",
                    says="mixed types in a product, and a constant that does not fit bf16",
                ),
            ),
            related=(
                "nonfinite",
                "unrepresentable-constant",
            ),
        ),
        Entry(
            name="random-draws-differ",
            kind="rule",
            meaning="random draws differ between the lanes, so values are not comparable after them",
            what=(
                "Lanes start from the same random state, and still the dropout masks, or other draws, differ from the "
                "reference's. Errors behind that point compare two different networks."
            ),
            why=(
                "An earlier branch consumed a different number of random values, a kernel draws differently for "
                "another type, or the model keeps a generator of its own."
            ),
            looks_like=(
                "A warning with the modules whose draws differ. Origins of NaN and Inf keep their meaning; relative "
                "errors behind the named modules mean little."
            ),
            what_to_try=(
                "Replay with `train: false` if the failure shows in evaluation mode too.",
                "Draw in FP32 and cast afterwards, in code that calls `rand` or `randn` with the tensor's own type.",
                "Pass the generator's state on, or seed it inside forward.",
            ),
            what_not_to_try=(
                "Reading the relative errors of later modules as drift.",
                "Switching dropout off in training for the sake of the comparison, when the failure needs it.",
            ),
            references=(
                Reference(
                    issue="Dao-AILab/flash-attention#180",
                    says="two implementations of dropout never draw the same mask",
                ),
                Reference(issue="pytorch/pytorch#2976", says="dropout differs between devices under the same seed"),
            ),
            related=(
                "divergence",
                "routing-flip",
            ),
        ),
        Entry(
            name="not-deterministic",
            kind="rule",
            meaning="the model differs between two runs of itself; small differences between precisions mean nothing",
            what=(
                "The FP32 reference was run twice from the same random state, and its outputs differ. A divergence "
                "that is not ten times larger than that is no evidence against a precision; the verdict is "
                "inconclusive."
            ),
            why=(
                "The model seeds itself anew, draws from the operating system, counts calls in a global, depends on "
                "the time, or runs kernels whose sums are ordered by chance."
            ),
            looks_like=(
                "A warning with the relative difference of the two runs. Origins of NaN and Inf are still named: they "
                "do not depend on small differences."
            ),
            what_to_try=(
                "Take the fresh randomness out: no `torch.seed()` or new generator in forward.",
                "Switch deterministic algorithms on, on a GPU.",
                "Reset counters and caches that live outside the module.",
            ),
            what_not_to_try=(
                "Widening the tolerances until the divergence is gone.",
                "Blaming the first module that differs: it may be the one that draws.",
            ),
            references=(
                Reference(
                    issue="pytorch/pytorch#109517",
                    says="a failure that came and went with the kernel, not with the precision",
                ),
            ),
            related=(
                "random-draws-differ",
                "divergence",
            ),
        ),
    ),
)
"""Beside the reference."""
