"""What mixed-precision training adds to forward and backward."""

from __future__ import annotations

from nanprobe.catalogue.entry import Entry, Family, Reference

__all__ = ["TRAINING"]

TRAINING = Family(
    title="Loss scale, gradients and the step",
    about="What mixed-precision training adds to forward and backward.",
    entries=(
        Entry(
            name="loss-scale-overflow",
            kind="mechanism",
            meaning="the gradient fits the format, the scaled gradient does not",
            what=(
                "Backward runs on the loss times the loss scale. Without the scale every gradient fits into the "
                "format; with it some gradient exceeds 65504 and becomes Inf."
            ),
            why=(
                "Dynamic scaling starts high on purpose (65536) and halves until it fits; the first skipped steps are "
                "normal. It is a fault when the scale was fixed by hand, or when no scale is both low enough for the "
                "largest and high enough for the smallest gradients."
            ),
            looks_like=(
                "Forward and loss are finite, phase is `backward`, and the report states the scale and whether any "
                "scale fits. With a scale that was given the finding is an error; with automatic scaling `conditions` "
                "tells the scale it settled at."
            ),
            what_to_try=(
                "Use dynamic scaling, or the largest scale that fits: 65504 divided by the largest unscaled gradient.",
                "Use bf16, which needs no loss scale.",
                "If gradients also flush to zero at that scale, keep the module with the extreme gradients in FP32.",
            ),
            what_not_to_try=(
                "Worrying about one skipped step at the start.",
                (
                    "Lowering the scale when the forward is non-finite: no scale can help there, and it falls until "
                    "it is zero."
                ),
                "Lowering the learning rate: it is applied after unscaling.",
            ),
            references=(
                Reference(issue="NVIDIA/apex#318", says="whether an overflow at the start of training is normal"),
                Reference(
                    issue="facebookresearch/fairseq#1529",
                    says="the minimum loss scale is reached because the forward fails",
                ),
                Reference(issue="deepspeedai/DeepSpeed#931", says="steps that are skipped while the scale settles"),
                Reference(issue="pytorch/pytorch#99640", says="a scaler whose scale falls below one"),
            ),
            related=(
                "gradient-underflow",
                "overflow",
                "loss-scale-collapsed",
            ),
        ),
        Entry(
            name="gradient-underflow",
            kind="mechanism",
            meaning="gradients became zero at this loss scale",
            what=(
                "Gradients that FP32 has are exactly zero in the low precision: they are below its smallest "
                "subnormal, 6.0e-8 in fp16. What is zero is not learned."
            ),
            why=(
                "Training in fp16 without a loss scaler, a scale that collapsed, a loss averaged over very many "
                "elements, or layers whose gradients are much smaller than those of the others, so that no single "
                "scale serves both."
            ),
            looks_like=(
                "A warning with the number and share of `flushed` elements, the loss scale and the parameter with "
                "most of them; `gradients` has the count for every parameter. Nothing is NaN."
            ),
            what_to_try=(
                "Use a gradient scaler: backward on the scaled loss, unscale, then clip and step.",
                "Raise the scale up to what the largest gradient allows.",
                "Use bf16: its smallest normal number is that of FP32.",
            ),
            what_not_to_try=(
                "Raising the learning rate: zero times anything is zero.",
                (
                    "Reading `grad.dtype` as proof: gradients stored in FP32 may have been flushed inside autocast "
                    "before they were stored."
                ),
                "Dropping the scaler because training runs: it may run without learning in some layers.",
            ),
            references=(
                Reference(issue="karpathy/nanoGPT#84", says="fp16 without a scaler"),
                Reference(issue="karpathy/nanoGPT#167", says="a run that fails late, and that a scaler or bf16 cures"),
            ),
            related=(
                "loss-scale-overflow",
                "underflow",
                "cast-underflow",
            ),
        ),
        Entry(
            name="update-underflow",
            kind="mechanism",
            meaning="an optimizer update below half the spacing of the weight changes nothing",
            what=(
                "The step is computed, added to the weight, and rounded away: the weight is the same as before. In "
                "bf16 values just under 1 are 0.0039 apart, so 1 - 0.001 is 1."
            ),
            why=(
                "Parameters themselves are in half precision, and learning rate times update is less than half their "
                "spacing. With a learning rate of 1e-5 nearly all weights of ordinary size stand still."
            ),
            looks_like=(
                "Phase `optimizer`, with the share of elements per parameter whose update is lost. Forward and "
                "backward are clean, and the loss stands still or falls only through a few small weights."
            ),
            what_to_try=(
                "Keep FP32 master weights: autocast with FP32 parameters does so.",
                "Use stochastic rounding or compensated summation in the optimizer when memory forbids FP32 weights.",
                "Freeze what is not meant to change, and train adapters in FP32.",
            ),
            what_not_to_try=(
                "Lowering the learning rate: it loses more updates.",
                "Raising it until something moves: the weights that do move then move too far.",
                "Changing to fp16 weights: three more bits, and Adam's state underflows.",
            ),
            references=(
                Reference(
                    issue="pytorch/ao#1124",
                    says="updates of bf16 weights that round to nothing, and stochastic rounding",
                ),
                Reference(issue="pytorch/torchtune#2254", says="bf16 training without master weights"),
                Reference(issue="pytorch/pytorch#120376", says="a request for stochastic rounding of bf16 weights"),
            ),
            related=(
                "absorption",
                "optimizer-error",
                "step-stalled",
            ),
        ),
        Entry(
            name="optimizer-error",
            kind="mechanism",
            meaning="the optimizer step turns finite gradients into NaN or Inf",
            what=(
                "Gradients are finite and the step is not: a division by a second moment that is zero, or a square "
                "that overflows, in the optimizer's own arithmetic."
            ),
            why=(
                "Adam on fp16 parameters keeps its moments in fp16: the square of a gradient below 2e-4 is zero, eps "
                "1e-8 is zero too, and 0 / 0 follows. Squares of gradients above 255.9 overflow. An Inf total norm "
                "makes gradient clipping multiply everything by zero."
            ),
            looks_like=(
                "Phase `optimizer`, the parameter, and the state that is to blame; forward and backward are clean. "
                "Where clipping zeroes everything the explanation says that the norm is Inf although each gradient is "
                "finite."
            ),
            what_to_try=(
                "Keep parameters and optimizer state in FP32 and run forward under autocast.",
                "Compute the gradient norm in FP32.",
                "As a stopgap, an eps of 1e-4 or more in fp16.",
            ),
            what_not_to_try=(
                "Lowering the learning rate: 0 / 0 does not depend on it.",
                "Gradient clipping as a cure: it runs before the step and may be the part that fails.",
                "Restarting from the last checkpoint with the same optimizer state.",
            ),
            references=(
                Reference(issue="pytorch/pytorch#8860", says="Adam on half-precision parameters"),
                Reference(
                    issue="pytorch/pytorch#147437",
                    says="second moment and eps are both zero in fp16, and the first step makes NaN",
                ),
                Reference(issue="openai/CLIP#40", says="NaN after one step with fp16 weights"),
                Reference(issue="facebookresearch/fairscale#263", says="a gradient norm that is computed in half"),
                Reference(issue="huggingface/diffusers#6086", says="the scaler refuses trainable parameters in fp16"),
            ),
            related=(
                "zero-second-moment",
                "update-underflow",
                "underflow",
            ),
        ),
    ),
)
"""Loss scale, gradients and the step."""
