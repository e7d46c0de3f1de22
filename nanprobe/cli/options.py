"""The options of the commands, each said once; a command lists those it has."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = [
    "Attention",
    "AutocastPolicy",
    "Backward",
    "Baseline",
    "Batch",
    "Cast",
    "Checkpoint",
    "Color",
    "ConfigFile",
    "Debug",
    "Device",
    "Dtype",
    "Dtypes",
    "Exclude",
    "FailOn",
    "FlushSubnormals",
    "Format",
    "Fp8Scaling",
    "Include",
    "Json",
    "LossScale",
    "Mode",
    "ModelConfig",
    "NoLocalError",
    "NoTrace",
    "Output",
    "Quiet",
    "ReducedPrecisionReduction",
    "Seed",
    "ShowConfig",
    "Tensors",
    "Tf32",
    "TrustPickle",
    "UpdateBaseline",
    "Verbose",
    "VerifyCrc",
]


def _number(text: str) -> float:
    """Read the value of a flag as a number; Typer's own message does not say what it got."""
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"expected a number, got '{text}'") from None


def _integer(text: str) -> int:
    """Read the value of a flag as an integer."""
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"expected an integer, got '{text}'") from None


ConfigFile = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="Config file; default: nanprobe.yaml, then nanprobe.yml, here."),
]
Checkpoint = Annotated[
    str | None, typer.Option("--checkpoint", metavar="PATH", help="Weights to load; beats the config.")
]
Batch = Annotated[str | None, typer.Option("--batch", metavar="PATH", help="Saved batch; beats the config.")]
Mode = Annotated[
    str | None,
    typer.Option("--mode", metavar="autocast|cast", help="autocast as in mixed-precision training, or cast as half()."),
]
AutocastPolicy = Annotated[
    str | None,
    typer.Option("--autocast-policy", metavar="cuda|cpu", help="Whose autocast operator lists to follow."),
]
Attention = Annotated[
    str | None,
    typer.Option(
        "--attention", metavar="fused|math|math-half", help="How attention is computed; math-half: scores in half."
    ),
]
Fp8Scaling = Annotated[
    str | None,
    typer.Option("--fp8-scaling", metavar="tensor|none", help="How 8-bit lanes scale the operands of a product."),
]
Tf32 = Annotated[
    bool | None,
    typer.Option("--tf32/--no-tf32", help="Round operands of FP32 products in low lanes.", show_default=False),
]
ReducedPrecisionReduction = Annotated[
    bool | None,
    typer.Option(
        "--reduced-precision-reduction/--no-reduced-precision-reduction",
        help="Add up partial sums of half products in half.",
        show_default=False,
    ),
]
FlushSubnormals = Annotated[
    bool | None,
    typer.Option(
        "--flush-subnormals/--no-flush-subnormals", help="Turn subnormals into zeros in low lanes.", show_default=False
    ),
]
Backward = Annotated[
    bool | None,
    typer.Option(
        "--backward/--no-backward", help="Replay backward; default: when there is a loss.", show_default=False
    ),
]
LossScale = Annotated[
    float | None,
    typer.Option(
        "--loss-scale",
        parser=_number,
        metavar="X",
        help="Use this loss scale as it is; default: 65536, halved until it fits.",
    ),
]
Device = Annotated[str | None, typer.Option("--device", metavar="cpu|cuda|cuda:N", help="Where to replay.")]
Seed = Annotated[
    int | None, typer.Option("--seed", parser=_integer, metavar="N", help="Seed of the factory and of every lane.")
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", metavar="fp16|bf16|fp32|...", help="Precision to replay; also tf32, fp8-e4m3, fp8-e5m2."),
]
Dtypes = Annotated[str, typer.Option("--dtypes", metavar="LIST", help="Precisions to compare, joined with commas.")]
NoTrace = Annotated[bool, typer.Option("--no-trace", help="Stop at modules; do not go down to operations.")]
NoLocalError = Annotated[
    bool, typer.Option("--no-local-error", help="Do not measure each module's own error; saves about a forward pass.")
]
ShowConfig = Annotated[
    bool, typer.Option("--show-config", help="Print the resolved config and where each value came from, and stop.")
]
TrustPickle = Annotated[
    bool, typer.Option("--trust-pickle", help="Let the batch file run code of its own while it is read.")
]

Cast = Annotated[
    str,
    typer.Option("--cast", metavar="LIST", help="Formats whose cast safety is judged, joined with commas."),
]
Tensors = Annotated[bool, typer.Option("--tensors", help="List every tensor with its statistics.")]
Include = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="PATTERN", help="Only tensors whose name matches; may be repeated."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="PATTERN", help="No tensors whose name matches; may be repeated."),
]
Baseline = Annotated[
    str | None,
    typer.Option("--baseline", metavar="FILE", help="Findings listed there are known and count for no exit code."),
]
UpdateBaseline = Annotated[
    bool, typer.Option("--update-baseline", help="Write the findings of this scan to the baseline.")
]
ModelConfig = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE", help="Compare names and shapes with this config's model."),
]
VerifyCrc = Annotated[
    bool,
    typer.Option("--verify-crc/--no-verify-crc", help="Compare the checksums of torch.save files.", show_default=False),
]

Format = Annotated[
    str | None, typer.Option("--format", metavar="table|json|markdown", help="Format of the report on stdout.")
]
Json = Annotated[bool, typer.Option("--json", help="Short for --format json.")]
Output = Annotated[
    list[str] | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the report to FILE (.json, .md, .txt) instead of stdout; may be repeated; - is stdout.",
    ),
]
FailOn = Annotated[
    str, typer.Option("--fail-on", metavar="error|warning|never", help="Lowest severity that gives exit code 1.")
]
Color = Annotated[str, typer.Option("--color", metavar="auto|always|never", help="Colour in the table.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Nothing on stderr but errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Every row, the timings and all conditions.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
