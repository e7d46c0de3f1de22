"""A small factory of hand-made reports: each function tells one story that a replay can end with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from nanprobe.formats import by_name
from nanprobe.records import (
    Coverage,
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
        explanation="Its inputs are finite (largest 31) and so are its weights; the exact result is beyond fp16's range.",
        remedies=(keep_fp32("encoder.layer.3.output.dense"), USE_BF16),
    )
    return replace(
        story.report(
            results={
                "fp16": PrecisionResult(
                    completed=True, verdict="precision", loss=math.nan, loss_error=math.nan, first_bad=bad
                )
            },
            loss=4.8127,
            findings=(
                Finding(
                    rule="overflow",
                    severity="error",
                    precision="fp16",
                    phase="forward",
                    module="encoder.layer.3.output.dense",
                    mechanism="overflow",
                    evidence={"count": 97, "elements": 159744, "first_index": [0, 17, 212]},
                    message="fp16 overflows in encoder.layer.3.output.dense: 97 of 159,744 elements are Inf",
                    remedies=bad.remedies,
                ),
            ),
            coverage=Coverage(modules=37, visited=35, never_visited=("head.dense", "head.out")),
        ),
        conditions=story.conditions,
    )
