"""What `scan-checkpoint` finds in optimizer, loss scaler, schedule and averages."""

from __future__ import annotations

from nanprobe.catalogue.entry import Entry, Family, Reference

__all__ = ["CHECKPOINT_STATE"]

CHECKPOINT_STATE = Family(
    title="Training state in a checkpoint",
    about="What `scan-checkpoint` finds in optimizer, loss scaler, schedule and averages.",
    entries=(
        Entry(
            name="nonfinite-optimizer-state",
            kind="rule",
            meaning="a moment or step counter of the optimizer holds NaN or Inf",
            what=(
                "The optimizer's memory is bad. The weights may still be finite; the first step after resuming makes "
                "them NaN."
            ),
            why=(
                "A step with non-finite gradients was taken, for want of a check or of a scaler; a moment overflowed "
                "in half precision; or state was restored into another layout."
            ),
            looks_like=(
                "An error with the parameter, the state (`exp_avg_sq`), the counts and the first index; "
                "`evidence.key` is the raw key in the file."
            ),
            what_to_try=(
                "Go back to an earlier checkpoint.",
                "If there is none, reset the state of the named parameters and warm the learning rate up again.",
                "Replay the step that did it: the weights before it and its batch are enough.",
            ),
            what_not_to_try=(
                "Resuming because the weights look fine.",
                "Lowering the learning rate: NaN times any rate is NaN.",
            ),
            references=(
                Reference(issue="NVIDIA-NeMo/RL#3544", says="restoring optimizer state makes the loss NaN"),
                Reference(
                    issue="bitsandbytes-foundation/bitsandbytes#1382",
                    says="reloaded state gives NaN at the first step",
                ),
            ),
            related=(
                "optimizer-error",
                "nonfinite-weight",
                "negative-second-moment",
            ),
        ),
        Entry(
            name="negative-second-moment",
            kind="rule",
            meaning="a mean of squares is negative",
            what=(
                "A second moment averages squares, so it cannot be below zero. Where it is, the root in the update is "
                "NaN."
            ),
            why=(
                "Damaged bytes, first and second moments mixed up by a conversion, a lossy compression of the state, "
                "or states added together with negative weights."
            ),
            looks_like="An error with the count, the smallest value and the first index.",
            what_to_try=(
                "Check that the conversion maps `exp_avg` and `exp_avg_sq` to themselves.",
                "Reset the state of that parameter, or go back to an earlier checkpoint.",
            ),
            what_not_to_try=(
                "Taking the magnitude and going on: the values are not the ones that training made.",
                "Raising eps: it is added after the root.",
            ),
            references=(
                Reference(
                    issue="bitsandbytes-foundation/bitsandbytes#1382",
                    says="state that, loaded again, gives NaN at the first step",
                ),
            ),
            related=(
                "zero-second-moment",
                "nonfinite-optimizer-state",
                "corrupt-file",
            ),
        ),
        Entry(
            name="zero-second-moment",
            kind="rule",
            meaning="a second moment is zero where the first moment is not",
            what=(
                "Adam divides the first moment by the root of the second. If that is zero, it divides by eps alone, "
                "and the update is too large by orders of magnitude."
            ),
            why=(
                "The state was saved or kept in fp16, where squares of gradients below 2e-4 become zero while the "
                "gradients themselves survive."
            ),
            looks_like=(
                "A warning with the number of elements and the first index, and often `dtype-mismatch` for the same "
                "state."
            ),
            what_to_try=(
                "Keep and save second moments in FP32.",
                "If only such a checkpoint is left, reset both moments of the parameter and warm up again.",
            ),
            what_not_to_try=(
                "Resuming and hoping: the first step can raise the loss a thousandfold.",
                (
                    "Lowering the learning rate for the first steps only: the moments take about 1 / (1 - beta2) "
                    "steps to recover."
                ),
            ),
            references=(
                Reference(
                    issue="ultralytics/ultralytics#24085",
                    says="second moments in fp16, and a loss that jumps on resuming",
                ),
                Reference(issue="pytorch/pytorch#8860", says="Adam with state in half precision"),
            ),
            related=(
                "optimizer-error",
                "dtype-mismatch",
                "cast-underflow",
            ),
        ),
        Entry(
            name="step-stalled",
            kind="rule",
            meaning="a step counter cannot count on, or does not fit the moments beside it",
            what=(
                "The counter has reached the value from which adding one changes nothing (256 in bf16, 2,048 in fp16, "
                "2^24 in FP32), is negative, is zero although moments are not, or differs from that of the other "
                "parameters."
            ),
            why=(
                "The optimizer was cast to half with the model, counter included; or state was restored in part, so "
                "that some parameters start again."
            ),
            looks_like="A warning: `the step counter has reached 256, where bf16 can no longer add 1`.",
            what_to_try=(
                "Keep the counter in FP32 or as an integer, and set it to the true step before resuming.",
                "If one group differs, find out why it was restored differently.",
            ),
            what_not_to_try=(
                (
                    "Resetting the counter to zero beside full moments: bias correction then rescales moments that "
                    "need no correction."
                ),
            ),
            references=(
                Reference(issue="pytorch/ao#4915", says="a counter in bf16 that stops at 256"),
                Reference(issue="deepspeedai/DeepSpeed#8496", says="a frozen counter freezes bias correction"),
            ),
            related=(
                "absorption",
                "dtype-mismatch",
                "learning-rate",
            ),
        ),
        Entry(
            name="nonfinite-scalar",
            kind="rule",
            meaning="a plain number of the checkpoint is NaN or Inf",
            what="A learning rate, a counter, a schedule's value or an entry of the training log is not finite.",
            why=(
                "The run had gone bad before it saved, and the log says from which step on; or a formula of the "
                "schedule divided by zero."
            ),
            looks_like=(
                "An error with the key and, for a log, the number of entries and the first step: `the training log's "
                "loss is not finite in 40 of 500 entries from step 4,600 on`. A callback's best score of Inf is a "
                "note."
            ),
            what_to_try=(
                "Go back to a checkpoint from before that step.",
                "Save a bundle at the first bad step next time, and replay it.",
                "An Inf gradient norm in fp16 runs may be a skipped step: look at the steps around it.",
            ),
            what_not_to_try=(
                "Taking the last checkpoint because its weights are finite: look at moments and averages too.",
                "Filtering NaN out of the log.",
            ),
            references=(
                Reference(
                    issue="fudan-generative-vision/hallo#152",
                    says="a loss that is NaN from the first steps after resuming",
                ),
            ),
            related=(
                "nonfinite-optimizer-state",
                "loss-scale-nonfinite",
                "learning-rate",
            ),
        ),
        Entry(
            name="loss-scale-collapsed",
            kind="rule",
            meaning="the loss scale is below one",
            what=(
                "Scaling now makes gradients smaller. Every scale that was tried overflowed, so the overflow does not "
                "come from scaling."
            ),
            why=(
                "The forward pass, the loss or a weight has been non-finite for many steps; the scaler halved at "
                "each, as it is built to."
            ),
            looks_like=(
                "An error with the key and the value: `scaler.scale: the loss scale is 5.3e-23, less than 1: gradients "
                "overflowed at every scale that was tried`."
            ),
            what_to_try=(
                "Find the first step that was skipped, and replay it with its batch: the origin is in its forward.",
                "Scan weights and moments of the same checkpoint.",
                "Use bf16 if the forward overflows.",
            ),
            what_not_to_try=(
                "Starting with a fresh scaler: it falls again, and hides when it began.",
                "Lowering the learning rate or clipping gradients: neither touches a forward overflow.",
                "Setting a minimum scale: steps are skipped for ever instead.",
            ),
            references=(
                Reference(issue="pytorch/pytorch#99640", says="a proposal to forbid scales below one"),
                Reference(issue="facebookresearch/fairseq#1529", says="training that ends at the minimum loss scale"),
            ),
            related=(
                "loss-scale-overflow",
                "overflow",
                "loss-scale-nonfinite",
            ),
        ),
        Entry(
            name="loss-scale-nonfinite",
            kind="rule",
            meaning="the loss scale is NaN or Inf, or has grown beyond any use",
            what=(
                "The scale that is restored on resuming is not a number, or is above 2^32, where fp16 overflows for "
                "any gradient above 1.5e-5."
            ),
            why=(
                "A scaler that grows without ever seeing a gradient, because the optimizer's parameters are not the "
                "model's; or damage to the file."
            ),
            looks_like="An error for NaN and Inf, a warning for a scale above 2^32.",
            what_to_try=(
                "Start with a fresh loss scaler.",
                (
                    "For a scale that is too large, check that gradients reach the scaler: parameters, unscaling, the "
                    "step."
                ),
            ),
            what_not_to_try=("Lowering it by hand and going on without knowing why it grew.",),
            references=(
                Reference(issue="pytorch/pytorch#157436", says="a loss scale that changed out of all proportion"),
                Reference(issue="facebookresearch/fairseq2#1346", says="a scaler without a scale after resuming"),
            ),
            related=(
                "loss-scale-collapsed",
                "loss-scale-absent",
                "loss-scale-overflow",
            ),
        ),
        Entry(
            name="loss-scale-absent",
            kind="rule",
            meaning="an fp16 run saved its optimizer and no loss scaler",
            what=(
                "Weights and optimizer are there, and the state of the loss scaler is not. Resuming starts at the "
                "scaler's initial scale."
            ),
            why=(
                "Only `model.state_dict()` and `optimizer.state_dict()` were saved; or a trainer saves the scaler in "
                "a file of its own that was not copied."
            ),
            looks_like="A warning that says what made it an fp16 run: the training arguments or the weights' type.",
            what_to_try=(
                "Save `scaler.state_dict()` too, and load it before the first step.",
                (
                    "After resuming without it, expect some skipped steps while the scale settles, and do not count "
                    "them as failures."
                ),
            ),
            what_not_to_try=(
                "Reporting the first skipped steps after resuming as divergence.",
                "Fixing the scale by hand instead.",
            ),
            references=(
                Reference(issue="huggingface/transformers#11663", says="scaler state that was not saved"),
                Reference(issue="facebookresearch/fairseq2#1346", says="the scale is missing after resuming"),
                Reference(issue="pytorch/torchtitan#146", says="scaler state in checkpoints"),
            ),
            related=(
                "loss-scale-overflow",
                "loss-scale-nonfinite",
            ),
        ),
        Entry(
            name="learning-rate",
            kind="rule",
            meaning="a learning rate or schedule that no run could want",
            what=(
                "A learning rate is negative, above 100, or zero without a schedule; or the schedule stands at its "
                "start although the run has many steps behind it."
            ),
            why=(
                "A formula of the schedule beyond its last step, a schedule that is never stepped, or one that was "
                "not restored."
            ),
            looks_like=(
                "A warning with key and value. Zero with a schedule is only a note: it may be the start of a warm-up "
                "or the end of a decay."
            ),
            what_to_try=(
                "Step and save the schedule with the optimizer.",
                "Print the rates of the next hundred steps before resuming.",
                "Check that restoring the optimizer does not overwrite the rate that you set.",
            ),
            what_not_to_try=(
                "Treating a NaN loss by this finding alone: a rate does not make a forward overflow.",
                "Setting the rate in the checkpoint by hand while the schedule stays as it is.",
            ),
            references=(
                Reference(
                    issue="karpathy/nanoGPT#136",
                    says="people change rate, warm-up and clipping, and the failure comes later",
                ),
            ),
            related=(
                "step-stalled",
                "nonfinite-scalar",
            ),
        ),
        Entry(
            name="ema-mismatch",
            kind="rule",
            meaning="an average of the weights does not fit the model beside it",
            what=(
                "The exponential average has another shape, is not finite, is zero throughout, or lacks parameters "
                "that the model has."
            ),
            why=(
                "One NaN in one step poisons an average for good; an average that was never updated stays at zero; "
                "parameters were added after it was made; a cast in place overflowed."
            ),
            looks_like=(
                "A warning with the tensor of the model that it belongs to; a finite average beside a model that is "
                "not finite is a note: it may be the last good copy."
            ),
            what_to_try=(
                "Rebuild the average from the model's weights, or from earlier checkpoints.",
                "Skip the update of the average when the step is skipped.",
                "Keep it in FP32 and cast a copy for evaluation.",
            ),
            what_not_to_try=(
                "Evaluating with the average and blaming the model.",
                "Waiting for a NaN to fade: it never does.",
            ),
            references=(
                Reference(issue="ultralytics/ultralytics#24986", says="one transient NaN poisons an average for good"),
                Reference(issue="ultralytics/ultralytics#24731", says="an average that overflows in fp16"),
            ),
            related=(
                "nonfinite-buffer",
                "nonfinite-weight",
                "cast-overflow",
            ),
        ),
    ),
)
"""Training state in a checkpoint."""
