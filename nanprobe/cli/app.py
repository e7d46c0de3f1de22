"""The commands. Each turns its flags into a config and output plan, calls the pipeline, and delivers the report.

Everything heavy is imported inside the commands, after the config was read and the outputs were checked: a mistake in
either is reported before torch is loaded.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from nanprobe.cli import options
from nanprobe.cli.outputs import plan_outputs, print_text
from nanprobe.cli.running import Flags, one_precision, run, several_precisions
from nanprobe.exit_codes import OK
from nanprobe.version import __version__

__all__ = ["app"]

app = typer.Typer(
    name="nanprobe",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)


def _version(asked: bool) -> None:
    if asked:
        print_text(f"nanprobe {__version__}\n")
        raise typer.Exit(0)


@app.callback(epilog="Exit codes: 0 clean, 1 findings, 2 unusable input, 3 could not complete, 130 interrupted.")
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Replay a saved batch in FP32, FP16 and BF16 side by side and name the first place where one goes bad."""


@app.command(short_help="One precision beside the FP32 reference.")
def replay(
    config: options.ConfigFile = None,
    dtype: options.Dtype = "fp16",
    checkpoint: options.Checkpoint = None,
    batch: options.Batch = None,
    mode: options.Mode = None,
    autocast_policy: options.AutocastPolicy = None,
    attention: options.Attention = None,
    fp8_scaling: options.Fp8Scaling = None,
    tf32: options.Tf32 = None,
    reduced_precision_reduction: options.ReducedPrecisionReduction = None,
    flush_subnormals: options.FlushSubnormals = None,
    backward: options.Backward = None,
    loss_scale: options.LossScale = None,
    device: options.Device = None,
    seed: options.Seed = None,
    no_trace: options.NoTrace = False,
    no_local_error: options.NoLocalError = False,
    show_config: options.ShowConfig = False,
    trust_pickle: options.TrustPickle = False,
    format_name: options.Format = None,
    json: options.Json = False,
    output: options.Output = None,
    fail_on: options.FailOn = "error",
    color: options.Color = "auto",
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> int:
    """Replay one saved batch in one precision beside the FP32 reference (fp32 beside FP64).

    Example: nanprobe replay --batch bad.pt --dtype fp16
    """
    started = time.perf_counter()
    outputs = plan_outputs(
        format_name=format_name, json=json, output=output, fail_on=fail_on, color=color, quiet=quiet, verbose=verbose
    )
    return run(
        "replay",
        one_precision(dtype),
        Flags(
            config=config,
            checkpoint=checkpoint,
            batch=batch,
            mode=mode,
            autocast_policy=autocast_policy,
            attention=attention,
            fp8_scaling=fp8_scaling,
            tf32=tf32,
            reduced_precision_reduction=reduced_precision_reduction,
            flush_subnormals=flush_subnormals,
            backward=backward,
            loss_scale=loss_scale,
            device=device,
            seed=seed,
            local_error=not no_local_error,
            operations=not no_trace,
            show_config=show_config,
            trust_pickle=trust_pickle,
            debug=debug,
        ),
        outputs,
        started=started,
    )


@app.command(short_help="FP32, FP16 and BF16 side by side.")
def compare_precisions(
    config: options.ConfigFile = None,
    dtypes: options.Dtypes = "fp32,fp16,bf16",
    checkpoint: options.Checkpoint = None,
    batch: options.Batch = None,
    mode: options.Mode = None,
    autocast_policy: options.AutocastPolicy = None,
    attention: options.Attention = None,
    fp8_scaling: options.Fp8Scaling = None,
    tf32: options.Tf32 = None,
    reduced_precision_reduction: options.ReducedPrecisionReduction = None,
    flush_subnormals: options.FlushSubnormals = None,
    backward: options.Backward = None,
    loss_scale: options.LossScale = None,
    device: options.Device = None,
    seed: options.Seed = None,
    no_trace: options.NoTrace = False,
    no_local_error: options.NoLocalError = False,
    show_config: options.ShowConfig = False,
    trust_pickle: options.TrustPickle = False,
    format_name: options.Format = None,
    json: options.Json = False,
    output: options.Output = None,
    fail_on: options.FailOn = "error",
    color: options.Color = "auto",
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> int:
    """Replay the same batch in FP32, FP16 and BF16 side by side; one table, one first culprit per precision.

    Example: nanprobe compare-precisions --config runs/nanprobe.yaml -o report.json -o -
    """
    started = time.perf_counter()
    outputs = plan_outputs(
        format_name=format_name, json=json, output=output, fail_on=fail_on, color=color, quiet=quiet, verbose=verbose
    )
    return run(
        "compare-precisions",
        several_precisions(dtypes),
        Flags(
            config=config,
            checkpoint=checkpoint,
            batch=batch,
            mode=mode,
            autocast_policy=autocast_policy,
            attention=attention,
            fp8_scaling=fp8_scaling,
            tf32=tf32,
            reduced_precision_reduction=reduced_precision_reduction,
            flush_subnormals=flush_subnormals,
            backward=backward,
            loss_scale=loss_scale,
            device=device,
            seed=seed,
            local_error=not no_local_error,
            operations=not no_trace,
            show_config=show_config,
            trust_pickle=trust_pickle,
            debug=debug,
        ),
        outputs,
        started=started,
    )


@app.command(short_help="Look at every tensor of checkpoints.")
def scan_checkpoint(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Checkpoints: files, index files or folders.")],
    cast: options.Cast = "fp16,bf16",
    tensors: options.Tensors = False,
    include: options.Include = None,
    exclude: options.Exclude = None,
    baseline: options.Baseline = None,
    update_baseline: options.UpdateBaseline = False,
    config: options.ModelConfig = None,
    verify_crc: options.VerifyCrc = True,
    format_name: options.Format = None,
    json: options.Json = False,
    output: options.Output = None,
    fail_on: options.FailOn = "error",
    color: options.Color = "auto",
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> int:
    """Scan checkpoints of any common format: every tensor, optimizer state, damaged files; runs nothing from them.

    Example: nanprobe scan-checkpoint checkpoint-1000/ --cast fp16,fp8-e4m3 -o report.json -o -
    """
    from nanprobe.cli.scanning import ScanFlags, run_scan

    outputs = plan_outputs(
        format_name=format_name, json=json, output=output, fail_on=fail_on, color=color, quiet=quiet, verbose=verbose
    )
    return run_scan(
        ScanFlags(
            paths=paths,
            cast=cast,
            tensors=tensors,
            include=include or (),
            exclude=exclude or (),
            baseline=baseline,
            update_baseline=update_baseline,
            config=config,
            check_crc=verify_crc,
        ),
        outputs,
    )


@app.command(short_help="What changed between two checkpoints.")
def diff_checkpoints(
    a: Annotated[str, typer.Argument(metavar="A", help="The earlier checkpoint.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The later checkpoint.")],
    include: options.Include = None,
    exclude: options.Exclude = None,
    format_name: options.Format = None,
    json: options.Json = False,
    output: options.Output = None,
    fail_on: options.FailOn = "error",
    color: options.Color = "auto",
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> int:
    """Compare two checkpoints tensor by tensor, worst first, across formats and types; runs nothing from them.

    Example: nanprobe diff-checkpoints checkpoint-1000/ checkpoint-2000/
    """
    from nanprobe.cli.scanning import run_diff

    outputs = plan_outputs(
        format_name=format_name, json=json, output=output, fail_on=fail_on, color=color, quiet=quiet, verbose=verbose
    )
    return run_diff(a, b, include or (), exclude or (), outputs)


@app.command(short_help="Show a saved report again.")
def render(
    report: Annotated[str, typer.Argument(metavar="REPORT.json", help="A report that -o report.json wrote.")],
    format_name: options.Format = None,
    json: options.Json = False,
    output: options.Output = None,
    fail_on: options.FailOn = "error",
    color: options.Color = "auto",
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> int:
    """Show a saved report again in another format, without torch; its findings and --fail-on decide the exit code.

    Example: nanprobe render report.json --format markdown
    """
    from nanprobe.serialize import load_report

    outputs = plan_outputs(
        format_name=format_name, json=json, output=output, fail_on=fail_on, color=color, quiet=quiet, verbose=verbose
    )
    source = Path(report)
    outputs.check([source])
    return outputs.deliver(load_report(source))


@app.command(short_help="What a mechanism or rule means, and what to try.")
def explain(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A name from a report; without one all are listed.")
    ] = None,
    format_name: options.Format = None,
    json: options.Json = False,
    output: options.Output = None,
    fail_on: options.FailOn = "error",
    color: options.Color = "auto",
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
) -> int:
    """Say what a mechanism or rule means, why it happens, what to try and what not; --verbose shows all in full.

    Example: nanprobe explain masked-row
    """
    from nanprobe.render.explained import explained, named_entry

    outputs = plan_outputs(
        format_name=format_name, json=json, output=output, fail_on=fail_on, color=color, quiet=quiet, verbose=verbose
    )
    if name is not None:
        named_entry(name)
    outputs.check([])
    outputs.emit(partial(explained, name))
    return OK
