"""A small factory of hand-made reports: each function tells one story that a replay can end with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from nanprobe.formats import by_name
from nanprobe.records import (
    Coverage,
    Divergence,
    Finding,
    FirstBad,
    Gradient,
    GradientRow,
    Measure,
    PrecisionResult,
    Remedy,
    ReplayReport,
    Tool,
    VisitRow,
)

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}
ROUNDOFF_ERROR = {"fp64": 0.0, "fp32": 0.0, "fp16": 2.1e-4, "bf16": 1.9e-3}


def measure(precision: str, absmax: float | None, *, shape: tuple[int, ...] = (4, 128, 312), **more: Any) -> Measure:
    """One precision's values at one visit; the fields that follow from ``absmax`` are filled in."""
    bad = more.get("nan", 0) + more.get("posinf", 0) + more.get("neginf", 0)
    headroom = math.log2(by_name(precision).max / absmax) if absmax else None
    values: dict[str, Any] = {
        "dtype": DTYPES[precision],
        "shape": shape,
        "elements": math.prod(shape),
        "absmax": absmax,
        "min": None if absmax is None else -absmax,
        "max": absmax,
        "mean": None if absmax is None else 0.0,
        "rms": None if absmax is None else absmax / 4,
        "headroom_bits": headroom,
        "rel_error": None if bad else ROUNDOFF_ERROR[precision],
    }
    return Measure(**{**values, **more})


class Story:
    """Collects the rows of one hand-made replay and turns them into a report."""

    def __init__(self, *precisions: str, mode: str = "autocast") -> None:
        self.precisions = precisions
        self.rows: list[VisitRow] = []
        self.gradients: list[GradientRow] = []
        self.conditions: dict[str, Any] = {
            "mode": mode,
            "autocast_policy": "cpu" if mode == "autocast" else None,
            "loss_scale": dict.fromkeys(precisions, 1.0),
            "seed": 0,
            "train": False,
            "emulated": [],
        }

    def visit(
        self,
        module: str,
        class_: str,
        absmax: float,
        *,
        leaf: bool = True,
        phase: str = "forward",
        visit: int = 0,
        shape: tuple[int, ...] = (4, 128, 312),
        skip: Iterable[str] = (),
        **special: Measure | Mapping[str, Any],
    ) -> None:
        """Add one row; ``special`` gives, by precision, a whole Measure or the fields that differ from a clean one."""
        measures: dict[str, Measure] = {}
        for name in self.precisions:
            if name in skip:
                continue
            given = special.get(name)
            if isinstance(given, Measure):
                measures[name] = given
            elif given is None:
                measures[name] = measure(name, absmax, shape=shape)
            else:
                measures[name] = measure(name, **{"absmax": absmax, "shape": shape, **given})
        self.rows.append(
            VisitRow(
                module=module,
                visit=visit,
                class_=class_,
                phase=phase,
                order=len(self.rows),
                depth=module.count(".") + 1 if module else 0,
                leaf=leaf,
                precisions=measures,
            )
        )

    def gradient(self, parameter: str, norm: float, *, elements: int = 97344, **special: Gradient) -> None:
        """Add one parameter's gradient."""
        self.gradients.append(
            GradientRow(
                parameter=parameter,
                module=parameter.rpartition(".")[0],
                shape=(elements,),
                elements=elements,
                precisions={
                    name: special.get(name) or Gradient(norm=norm, absmax=norm / 8, rel_error=ROUNDOFF_ERROR[name])
                    for name in self.precisions
                },
            )
        )

    def report(
        self,
        *,
        results: Mapping[str, PrecisionResult] | None = None,
        findings: tuple[Finding, ...] = (),
        command: str = "compare-precisions",
        coverage: Coverage | None = None,
        loss: float | None = None,
        subject: Mapping[str, Any] | None = None,
    ) -> ReplayReport:
        """Return the report; a precision without a result is clean."""
        reference = self.precisions[0]
        precisions = {
            name: (results or {}).get(name)
            or PrecisionResult(
                completed=True,
                verdict="clean",
                loss=loss,
                loss_error=None if loss is None else ROUNDOFF_ERROR[name],
            )
            for name in self.precisions
        }
        verdicts = [result.verdict for result in precisions.values()]
        worst = next(name for name in ("precision", "not-precision", "inconclusive", "clean") if name in verdicts)
        bad = next((r.first_bad for r in precisions.values() if r.verdict == worst and r.first_bad), None)
        modules = len({row.module for row in self.rows})
        return ReplayReport(
            tool=Tool(version="0.1.0"),
            command=command,
            exit_code=0 if worst == "clean" else 3 if worst == "inconclusive" else 1,
            verdict=worst,
            subject=subject or {"config": "nanprobe.yaml", "checkpoint": "model.safetensors", "batch": "bad.pt"},
            environment={"torch": "2.13.0", "device": "cpu", "threads": 2},
            conditions=self.conditions,
            precisions=precisions,
            reference=reference,
            first_bad=bad,
            modules=tuple(self.rows),
            gradients=tuple(self.gradients),
            timings={"import": 1.25, "load": 0.0312, **dict.fromkeys(self.precisions, 0.5), "render": 0.0004},
            findings=findings,
            coverage=coverage or Coverage(modules=modules, visited=modules),
        )


def keep_fp32(module: str) -> Remedy:
    """The remedy that is offered most."""
    return Remedy(kind="keep-fp32", text=f"keep `{module}` in FP32", modules=(module,))


USE_BF16 = Remedy(kind="use-bf16", text="run the model in bf16, whose range is that of FP32")


def bert_layers(story: Story, layers: Iterable[int]) -> None:
    """Healthy encoder layers."""
    for index in layers:
        at = f"encoder.layer.{index}"
        story.visit(f"{at}.attention.query", "Linear", 6.5)
        story.visit(f"{at}.attention.output", "Linear", 3.25)
        story.visit(f"{at}.attention", "Attention", 3.25, leaf=False)
        story.visit(f"{at}.norm", "LayerNorm", 11.5)
        story.visit(f"{at}.intermediate", "Linear", 22.0, shape=(4, 128, 1200))
        story.visit(f"{at}.output.dense", "Linear", 14.0)
        story.visit(at, "Layer", 14.0, leaf=False)


def fp16_overflow() -> ReplayReport:
    """fp16 overflows in a Linear layer in the middle of an encoder; bf16 is fine; the loss is NaN."""
    story = Story("fp32", "fp16", "bf16")
    propagated = {"fp16": {"absmax": None, "nan": 159744, "state": "propagated"}}
    story.visit("embeddings.word", "Embedding", 0.42)
    story.visit("embeddings.norm", "LayerNorm", 9.5)
    story.visit("embeddings", "Embeddings", 9.5, leaf=False)
    bert_layers(story, range(3))
    story.visit("encoder.layer.3.attention", "Attention", 4.5, leaf=False)
    story.visit("encoder.layer.3.norm", "LayerNorm", 12.25)
    story.visit("encoder.layer.3.intermediate", "Linear", 31.0, shape=(4, 128, 1200))
    story.visit(
        "encoder.layer.3.output.dense",
        "Linear",
        190212.0,
        fp16={
            "absmax": 65472.0,
            "posinf": 90,
            "neginf": 7,
            "state": "origin",
            "first_index": (0, 17, 212),
            "samples": (0, 2),
        },
    )
    story.visit("encoder.layer.3.output.norm", "LayerNorm", 11.0, **propagated)
    story.visit("encoder.layer.3", "Layer", 11.0, leaf=False, **propagated)
    for index in (4, 5):
        story.visit(f"encoder.layer.{index}.attention", "Attention", 3.5, leaf=False, **propagated)
        story.visit(f"encoder.layer.{index}.norm", "LayerNorm", 3.5, **propagated)
        story.visit(f"encoder.layer.{index}", "Layer", 3.5, leaf=False, **propagated)
    story.visit("pooler", "Linear", 2.5, **propagated)
    story.visit("", "MiniBert", 2.5, leaf=False, **propagated)
    bad = FirstBad(
        precision="fp16",
        phase="forward",
        module="encoder.layer.3.output.dense",
        visit=0,
        class_="Linear",
        mechanism="overflow",
        precision_related=True,
        count=97,
        elements=159744,
        index=(0, 17, 212),
        samples=(0, 2),
        input_absmax=31.0,
        reference_absmax=190212.0,
        limit=65504.0,
        explanation="Its inputs are finite (largest 31), and so are its weights; the result is too large for fp16.",
        remedies=(keep_fp32("encoder.layer.3.output.dense"), USE_BF16),
    )
    return story.report(
        results={
            "fp16": PrecisionResult(
                completed=True, verdict="precision", loss=math.nan, loss_error=math.nan, first_bad=bad
            )
        },
        loss=4.8127,
        findings=(finding_of(bad, "fp16 overflows in encoder.layer.3.output.dense: 97 of 159,744 elements are Inf"),),
        coverage=Coverage(modules=37, visited=35, never_visited=("head.dense", "head.out")),
    )


def own_code() -> ReplayReport:
    """The gate product of a gated feed-forward layer overflows: the parent's own code, between two children."""
    story = Story("fp32", "fp16", "bf16", mode="cast")
    bad_after = {"fp16": {"absmax": None, "nan": 1024, "state": "propagated"}}
    story.visit("embed_tokens", "Embedding", 0.5, shape=(2, 8, 64))
    for index in range(2):
        at = f"layers.{index}"
        story.visit(f"{at}.self_attn", "Attention", 2.5, leaf=False, shape=(2, 8, 64))
        story.visit(f"{at}.mlp.gate_proj", "Linear", 12.0 if index == 0 else 256.0, shape=(2, 8, 256))
        story.visit(f"{at}.mlp.act_fn", "SiLU", 12.0 if index == 0 else 256.0, shape=(2, 8, 256))
        story.visit(f"{at}.mlp.up_proj", "Linear", 9.0 if index == 0 else 261.5, shape=(2, 8, 256))
        if index == 0:
            story.visit(f"{at}.mlp.down_proj", "Linear", 14.0, shape=(2, 8, 64))
            story.visit(f"{at}.mlp", "GatedMLP", 14.0, leaf=False, shape=(2, 8, 64))
            story.visit(at, "DecoderLayer", 15.5, leaf=False, shape=(2, 8, 64))
    bad = {"absmax": None, "posinf": 40, "neginf": 24, "nan": 960, "state": "propagated"}
    story.visit("layers.1.mlp.down_proj", "Linear", 311.0, shape=(2, 8, 64), fp16=bad)
    story.visit("layers.1.mlp", "GatedMLP", 311.0, leaf=False, shape=(2, 8, 64), fp16={**bad, "state": "origin"})
    story.visit("layers.1", "DecoderLayer", 313.0, leaf=False, shape=(2, 8, 64), fp16=bad)
    story.visit("norm", "RMSNorm", 4.0, shape=(2, 8, 64), **bad_after)
    story.visit("lm_head", "Linear", 3.0, shape=(2, 8, 64), **bad_after)
    story.visit("", "TinyGated", 3.0, leaf=False, shape=(2, 8, 64), **bad_after)
    first = FirstBad(
        precision="fp16",
        phase="forward",
        module="layers.1.mlp",
        visit=0,
        class_="GatedMLP",
        precision_related=True,
        count=1024,
        elements=1024,
        index=(0, 0, 0),
        reference_absmax=311.0,
        limit=65504.0,
        between=("layers.1.mlp.up_proj", "layers.1.mlp.down_proj"),
        explanation="Every child's inputs and outputs are finite until down_proj receives an Inf.",
        remedies=(keep_fp32("layers.1.mlp"),),
    )
    return story.report(
        results={"fp16": PrecisionResult(completed=True, verdict="precision", first_bad=first)},
    )


def silent_divergence() -> ReplayReport:
    """bf16 drifts in a rotary embedding; nothing is NaN or Inf."""
    story = Story("fp32", "bf16", mode="cast")
    story.visit("model.embed_tokens", "Embedding", 0.5)
    story.visit("model.rotary_emb", "RotaryEmbedding", 1.0, bf16={"rel_error": 0.7231, "state": "diverged"})
    for index in range(6):
        for part, type_name in (("self_attn", "Attention"), ("mlp", "MLP")):
            error = {"rel_error": 0.05 + index / 100, "local_error": 0.0021, "state": "diverged"}
            story.visit(f"model.layers.{index}.{part}", type_name, 2.5, bf16=error)
    story.visit("lm_head", "Linear", 6.0, bf16={"rel_error": 0.11, "state": "diverged"})
    story.visit("", "TinyRope", 6.0, leaf=False, bf16={"rel_error": 0.11, "state": "diverged"})
    drift = Divergence(
        precision="bf16",
        phase="forward",
        module="model.rotary_emb",
        visit=0,
        class_="RotaryEmbedding",
        mechanism="divergence",
        rel_error=0.7231,
        local_error=0.7231,
        tolerance=0.0156,
        explanation="Given the same inputs it differs as much, so the error arises here and was not handed down.",
    )
    return story.report(
        command="replay",
        results={
            "bf16": PrecisionResult(
                completed=True, verdict="precision", loss=5.512, loss_error=0.0311, first_divergence=drift
            )
        },
        loss=5.346,
        findings=(
            finding_of(drift, "bf16 drifts in model.rotary_emb"),
            Finding(
                rule="underflow",
                severity="warning",
                precision="bf16",
                module="lm_head",
                message="2 of 512 rows of lm_head are zero where FP32 is not",
                remedies=(Remedy(kind="rewrite", text="compute the rotary table in FP32 and cast at the end"),),
            ),
        ),
    )


def two_drifts() -> ReplayReport:
    """fp16 and bf16 both drift in a time encoding; bf16 is further off, measured in its tolerance."""
    story = Story("fp32", "fp16", "bf16", mode="cast")
    story.visit("embed", "Embedding", 0.5)
    drifted = {"fp16": {"rel_error": 0.02, "state": "diverged"}, "bf16": {"rel_error": 0.33, "state": "diverged"}}
    story.visit("time", "TimeEncoding", 1.0, **drifted)
    story.visit("", "Events", 6.0, leaf=False, **drifted)
    results = {}
    for name, error, tolerance in (("fp16", 0.02, 0.0078), ("bf16", 0.33, 0.0625)):
        drift = Divergence(
            precision=name,
            phase="forward",
            module="time",
            visit=0,
            class_="TimeEncoding",
            mechanism="divergence",
            rel_error=error,
            tolerance=tolerance,
        )
        results[name] = PrecisionResult(completed=True, verdict="precision", first_divergence=drift)
    return story.report(results=results)


def absorbed_gradient() -> ReplayReport:
    """A branch that forward masks out makes NaN in backward, in every precision, and nothing comes of it."""
    story = Story("fp32", "fp16", "bf16")
    gone = {name: {"absmax": None, "nan": 592, "state": "propagated"} for name in story.precisions}
    for name, type_name in (("relu", "ReLU"), ("pool", "Pool"), ("", "Events")):
        story.visit(name, type_name, 3.0, leaf=bool(name), shape=(4, 16, 48))
    story.visit("", "Events", 0.18, phase="backward", leaf=False, shape=(4, 16, 48))
    story.visit("pool", "Pool", 0.03, phase="backward", shape=(4, 48))
    story.visit("relu", "ReLU", 0.009, phase="backward", shape=(4, 16, 48), **gone)
    story.gradient("head.weight", 0.5)
    results = {}
    for name in ("fp16", "bf16"):
        first = FirstBad(
            precision=name,
            phase="backward",
            module="pool",
            visit=0,
            class_="Pool",
            op="aten.sqrt",
            mechanism="masked-gradient",
            precision_related=False,
            count=37,
            elements=192,
            limit=by_name(name).max,
        )
        results[name] = PrecisionResult(completed=True, verdict="clean", loss=1.036, first_bad=first)
    return story.report(results=results, loss=1.036)


def full_precision() -> ReplayReport:
    """FP32 beside FP64: nothing is cast, so the mode says nothing."""
    story = Story("fp64", "fp32")
    story.conditions["notes"] = ["autocast ran with PyTorch's CPU operator lists, not the CUDA lists"]
    story.visit("head", "Linear", 3.0)
    story.visit("", "Tiny", 3.0, leaf=False)
    lists = ("blocks", "heads")
    coverage = Coverage(modules=4, visited=2, never_visited=lists, not_callable=lists)
    return story.report(command="replay", loss=0.5, coverage=coverage)


def clean() -> ReplayReport:
    """Nothing goes wrong in a long model, forward and backward."""
    story = Story("fp32", "fp16", "bf16")
    story.conditions.update(train=True, loss_scale={"fp32": 1.0, "fp16": 65536.0, "bf16": 1.0})
    bert_layers(story, range(4))
    story.visit("", "MiniBert", 2.5, leaf=False, bf16={"rel_error": 0.0049})
    for row in reversed(story.rows[:]):
        story.visit(row.module, row.class_, 0.0031, phase="backward", leaf=row.leaf)
    for index in range(4):
        story.gradient(f"encoder.layer.{index}.norm.weight", 0.75, elements=312)
        story.gradient(f"encoder.layer.{index}.output.dense.weight", 1.5)
    return story.report(loss=4.8127)


def not_precision() -> ReplayReport:
    """FP32 makes the same NaN in the same place."""
    story = Story("fp32", "fp16", "bf16")
    bad = {name: {"absmax": 0.0, "nan": 3, "state": "origin"} for name in story.precisions}
    gone = {name: {"absmax": None, "nan": 1, "state": "propagated"} for name in story.precisions}
    story.visit("encoder", "Linear", 2.0, shape=(4, 16))
    story.visit("logvar", "LogVariance", 2.0, shape=(4, 16), **bad)
    story.visit("", "Autoencoder", 2.0, leaf=False, shape=(), **gone)
    results = {}
    for name in story.precisions:
        first = FirstBad(
            precision=name,
            phase="forward",
            module="logvar",
            visit=0,
            class_="LogVariance",
            mechanism="domain-error",
            precision_related=False,
            count=3,
            elements=64,
            index=(1, 7),
            samples=(1, 3),
            explanation="The logarithm of a negative number is NaN in every precision.",
        )
        results[name] = PrecisionResult(completed=True, verdict="not-precision", loss=math.nan, first_bad=first)
    return story.report(results=results)


def nan_in_batch() -> ReplayReport:
    """The batch held NaN before anything ran."""
    story = Story("fp32", "fp16", "bf16")
    gone = {name: {"absmax": None, "nan": 64, "state": "propagated"} for name in story.precisions}
    story.visit("stem", "Conv2d", 2.0, shape=(4, 16), **gone)
    story.visit("", "Denoiser", 2.0, leaf=False, shape=(4, 16), **gone)
    first = FirstBad(
        precision="fp32",
        phase="input",
        module=None,
        visit=None,
        class_=None,
        mechanism="nonfinite-input",
        precision_related=False,
        count=3,
        elements=2048,
        index=(1, 0, 7),
        samples=(1,),
        parameter="x",
        remedies=(Remedy(kind="fix-data", text="find out where sample 1 comes from and drop or repair it"),),
    )
    result = PrecisionResult(completed=True, verdict="not-precision", loss=math.nan, first_bad=first)
    return story.report(
        results={name: replace(result, first_bad=replace(first, precision=name)) for name in story.precisions},
        findings=(finding_of(first, "the batch field x holds 3 NaN", evidence={"nan": 3, "elements": 2048}),),
    )


def lane_that_raised() -> ReplayReport:
    """fp16 has no kernel for an operation; bf16 is clean."""
    story = Story("fp32", "fp16", "bf16", mode="cast")
    story.visit("features", "Conv2d", 2.0, shape=(4, 16))
    story.visit("solve", "Cholesky", 2.0, shape=(4, 16), skip=["fp16"])
    story.visit("", "Gaussian", 2.0, leaf=False, shape=(4, 16), skip=["fp16"])
    message = "RuntimeError: \"cholesky_cpu\" not implemented for 'Half'\n  in solve"
    return story.report(
        results={"fp16": PrecisionResult(completed=False, verdict="inconclusive", error=message)},
        findings=(
            Finding(
                rule="lane-raised",
                severity="error",
                precision="fp16",
                phase="forward",
                module="solve",
                message=f"the fp16 lane raised {message}",
            ),
        ),
    )


def backward_origin() -> ReplayReport:
    """The forward is clean; a gradient turns NaN in the backward of a square root; further gradients are flushed."""
    story = Story("fp32", "fp16")
    story.conditions.update(train=True, loss_scale={"fp32": 1.0, "fp16": 1024.0})
    for name, type_name in (("proj", "Linear"), ("distance", "Distance"), ("head", "Linear"), ("", "Metric")):
        story.visit(name, type_name, 3.0, leaf=bool(name), shape=(8, 32))
    story.visit("head", "Linear", 2e-3, phase="backward", shape=(8, 32))
    story.visit("distance", "Distance", 1e-3, phase="backward", shape=(8, 32))
    story.visit(
        "proj",
        "Linear",
        1e-3,
        phase="backward",
        shape=(8, 32),
        fp16={"absmax": 0.25, "nan": 32, "state": "propagated", "samples": (3,)},
    )
    story.gradient("proj.weight", 0.5, elements=1024, fp16=Gradient(norm=None, absmax=None, nan=1024))
    story.gradient("proj.bias", 0.5, elements=32, fp16=Gradient(norm=0.25, absmax=0.125, nan=1, posinf=2))
    story.gradient(
        "head.weight", 0.25, elements=1024, fp16=Gradient(norm=0.25, absmax=0.125, zero=96, flushed=96, rel_error=0.003)
    )
    first = FirstBad(
        precision="fp16",
        phase="backward",
        module="distance",
        visit=0,
        class_="Distance",
        precision_related=True,
        count=32,
        elements=256,
        index=(3, 0),
        samples=(3,),
        reference_absmax=1e-3,
        explanation="The gradient of its output is finite and the gradient of its input is not.",
    )
    return story.report(
        command="replay",
        results={
            "fp16": PrecisionResult(
                completed=True, verdict="precision", loss=0.6931, loss_error=2e-4, loss_scale=1024.0, first_bad=first
            )
        },
        loss=0.6932,
        findings=(
            Finding(
                rule="gradient-underflow",
                severity="warning",
                precision="fp16",
                phase="backward",
                module="head",
                message="96 of 1,024 elements of the gradient of head.weight are zero in fp16 and not in FP32",
                ignored=True,
                ignored_why="the head is frozen in the real run",
            ),
        ),
    )


def deep() -> ReplayReport:
    """Two hundred visits, one bad in the middle and one that absorbs what another made."""
    story = Story("fp32", "fp16", "bf16")
    for index in range(66):
        at = f"transformer.decoder.blocks.{index}"
        special: dict[str, Any] = {}
        if index == 40:
            special = {"fp16": {"absmax": 65504.0, "posinf": 1, "state": "origin"}}
        elif index > 40:
            special = {"fp16": {"absmax": None, "nan": 159744, "state": "propagated"}}
        story.visit(f"{at}.attention.output_projection", "QuantizableLinear", 4.0, **(special if index > 40 else {}))
        story.visit(f"{at}.feed_forward.output_projection", "QuantizableLinear", 4.0 + 2000 * index, **special)
        absorbed = {"fp16": {"state": "absorbed"}} if index == 65 else special if index > 40 else {}
        story.visit(at, "ParallelTransformerBlock", 4.0, leaf=False, **absorbed)
    story.visit("lm_head", "Linear", 9.0)
    story.visit("", "Transformer", 9.0, leaf=False)
    first = FirstBad(
        precision="fp16",
        phase="forward",
        module="transformer.decoder.blocks.40.feed_forward.output_projection",
        visit=0,
        class_="QuantizableLinear",
        mechanism="overflow",
        precision_related=True,
        count=1,
        elements=159744,
        index=(0, 0, 0),
        samples=tuple(range(12)),
        reference_absmax=80004.0,
        limit=65504.0,
        absorbed_by="transformer.decoder.blocks.65",
    )
    return story.report(
        results={"fp16": PrecisionResult(completed=True, verdict="precision", first_bad=first)},
        coverage=Coverage(
            modules=212,
            visited=200,
            never_visited=("transformer.decoder.blocks", *(f"adapters.{index}" for index in range(11))),
            not_callable=("transformer.decoder.blocks",),
            outputs_not_inspected=("cache",),
            ops_outside_modules=3,
        ),
    )


WEIRD = "layers.\x1b[31mred\x1b[0m|<script>alert(1)</script>`tick`\n\u202eback"


def weird_names() -> ReplayReport:
    """Module names and messages that try to act on a terminal or a web page."""
    story = Story("fp32", "fp16", mode="cast")
    story.visit("0.10", "Linear", 1.0)
    story.visit("1e5", "Linear", 1.0)
    story.visit(WEIRD, "We|ird<b>", 70000.0, fp16={"absmax": 2.0, "posinf": 1, "state": "origin"})
    story.visit("", "@someone", 1.0, leaf=False, fp16={"absmax": None, "nan": 159744, "state": "propagated"})
    first = FirstBad(
        precision="fp16",
        phase="forward",
        module=WEIRD,
        visit=0,
        class_="We|ird<b>",
        count=1,
        elements=159744,
        index=(0, 0, 0),
        explanation=f"See {WEIRD} and @someone #1 *bold* _under_.",
        remedies=(keep_fp32(WEIRD),),
    )
    return story.report(
        command="replay",
        results={"fp16": PrecisionResult(completed=True, verdict="precision", first_bad=first, loss=math.inf)},
        findings=(Finding(rule="overflow", severity="warning", message=f"{WEIRD} is odd", module=WEIRD),),
        coverage=Coverage(modules=5, visited=4, never_visited=(WEIRD,)),
        subject={"config": "it's mine; rm -rf.yaml"},
    )


def shared_module() -> ReplayReport:
    """One normalisation layer is called three times; its third visit goes bad."""
    story = Story("fp32", "fp16", mode="cast")
    for visit in range(3):
        story.visit(f"blocks.{visit}", "Block", 200.0 * (visit + 1), shape=(2, 64))
        bad = {"fp16": {"absmax": 0.0, "nan": 64, "state": "origin"}} if visit == 2 else {}
        story.visit("norm", "RMSNorm", 4.0, visit=visit, shape=(2, 64), **bad)
    story.visit("", "Recurrent", 4.0, leaf=False, shape=(2, 64), fp16={"nan": 64, "state": "propagated"})
    first = FirstBad(
        precision="fp16",
        phase="forward",
        module="norm",
        visit=2,
        class_="RMSNorm",
        count=64,
        elements=128,
        index=(0, 0),
        samples=(0,),
        reference_absmax=4.0,
    )
    return story.report(
        command="replay", results={"fp16": PrecisionResult(completed=True, verdict="precision", first_bad=first)}
    )


def routing() -> ReplayReport:
    """A mixture of experts sends tokens another way in bf16: some visits are missing in one precision."""
    story = Story("fp32", "bf16")
    story.visit("router", "Linear", 4.0, shape=(16, 8))
    story.visit("experts.0", "Expert", 2.0, shape=(9, 32))
    story.visit("experts.3", "Expert", 2.0, shape=(7, 32), skip=["bf16"])
    story.visit(
        "experts.5", "Expert", 2.0, shape=(7, 32), skip=["fp32"], bf16={"rel_error": None, "note": "no reference"}
    )
    story.visit("counts", "Counter", 2.0, bf16={"absmax": None, "note": "no floating-point output", "rel_error": None})
    story.visit("nothing", "Identity", 0.0, shape=(0, 32), fp32={"absmax": None}, bf16={"absmax": None})
    story.visit("", "Mixture", 2.0, leaf=False, shape=(16, 32), bf16={"rel_error": 0.42, "state": "diverged"})
    return story.report(
        findings=(
            Finding(
                rule="routing-flip",
                severity="warning",
                precision="bf16",
                phase="forward",
                module="router",
                message="7 of 16 tokens take another expert in bf16",
            ),
        ),
    )


def loss_function() -> ReplayReport:
    """The loss function, outside the model, overflows."""
    story = Story("fp32", "fp16", mode="cast")
    story.visit("head", "Linear", 300.0, shape=(8, 32))
    story.visit("", "Regressor", 300.0, leaf=False, shape=(8, 32))
    for name in ("", "head"):
        bad = {"fp16": {"absmax": None, "nan": 256, "state": "propagated"}}
        story.visit(name, "Linear" if name else "Regressor", 0.01, phase="backward", shape=(8, 32), **bad)
    first = FirstBad(
        precision="fp16",
        phase="loss",
        module=None,
        visit=None,
        class_=None,
        mechanism="overflow",
        precision_related=True,
        count=1,
        elements=1,
        index=(),
        reference_absmax=90000.0,
        limit=65504.0,
    )
    return story.report(
        command="replay",
        results={"fp16": PrecisionResult(completed=True, verdict="precision", loss=math.inf, first_bad=first)},
        loss=90000.0,
        findings=(finding_of(first, "the loss overflows", evidence={"posinf": 1, "elements": 1}),),
    )


def finding_of(place: FirstBad | Divergence, message: str, *, evidence: Mapping[str, Any] | None = None) -> Finding:
    """The finding that stands for a culprit."""
    return Finding(
        rule=place.mechanism or "divergence",
        severity="error",
        precision=place.precision,
        phase=place.phase,
        module=place.module,
        mechanism=place.mechanism,
        evidence=evidence or {},
        message=message,
        remedies=place.remedies if isinstance(place, FirstBad) else (),
    )


STORIES = {
    story.__name__.replace("_", "-"): story
    for story in (
        fp16_overflow,
        own_code,
        silent_divergence,
        two_drifts,
        absorbed_gradient,
        full_precision,
        clean,
        not_precision,
        nan_in_batch,
        lane_that_raised,
        backward_origin,
        deep,
        weird_names,
        shared_module,
        routing,
        loss_function,
    )
}
"""Every story by the name of its gold files."""
