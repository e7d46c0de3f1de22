"""From the flags of a model command to its exit code: config, checks, the pipeline, the report."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanprobe._console.bar import ConsoleProgress
from nanprobe._console.user_code import user_code
from nanprobe.cli.outputs import Outputs, print_text
from nanprobe.errors import Interrupted, UsageError
from nanprobe.exit_codes import OK
from nanprobe.formats import LOW_PRECISIONS
from nanprobe.nearest import suggestion

if TYPE_CHECKING:
    from nanprobe.config import Config

__all__ = ["Flags", "one_precision", "run", "several_precisions"]

_REPLAYED = ("fp32", *LOW_PRECISIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The flags of a model command that are not about output; None where a flag was not given."""

    config: str | None
    checkpoint: str | None
    batch: str | None
    mode: str | None
    autocast_policy: str | None
    attention: str | None
    fp8_scaling: str | None
    tf32: bool | None
    reduced_precision_reduction: bool | None
    flush_subnormals: bool | None
    backward: bool | None
    loss_scale: float | None
    device: str | None
    seed: int | None
    local_error: bool
    operations: bool
    show_config: bool
    trust_pickle: bool
    debug: bool = False


def one_precision(name: str) -> tuple[str, ...]:
    """Return reference and precision of ``replay --dtype``; FP32 itself is judged against FP64."""
    low = _precision(name, "--dtype")
    return ("fp64", "fp32") if low == "fp32" else ("fp32", low)


def several_precisions(names: str) -> tuple[str, ...]:
    """Return the precisions of ``compare-precisions --dtypes``, FP32 always among them and first."""
    asked = [_precision(name.strip(), "--dtypes") for name in names.split(",") if name.strip()]
    low = [name for name in dict.fromkeys(asked) if name != "fp32"]
    if not low:
        raise UsageError(f"--dtypes: name at least one of {_listed()} to compare with FP32")
    return ("fp32", *low)


def _precision(name: str, flag: str) -> str:
    if name in _REPLAYED:
        return name
    raise UsageError(f"{flag}: no such precision '{name}'; {suggestion(name, _REPLAYED, limit=len(_REPLAYED))}")


def _listed() -> str:
    return f"{', '.join(LOW_PRECISIONS[:-1])} and {LOW_PRECISIONS[-1]}"


def run(command: str, precisions: tuple[str, ...], flags: Flags, outputs: Outputs, *, started: float) -> int:
    """Run a model command and deliver its report; return the exit code.

    ``started`` is ``time.perf_counter()`` of when the command began. What the user's own code prints goes to stderr.
    """
    from nanprobe.config import Overrides, apply_overrides, config_document, find_config, load_config, show_config

    source = Path(flags.config) if flags.config is not None else find_config(Path())
    overrides = Overrides(
        checkpoint=flags.checkpoint,
        batch=flags.batch,
        mode=flags.mode,
        autocast_policy=flags.autocast_policy,
        attention=flags.attention,
        fp8_scaling=flags.fp8_scaling,
        tf32=flags.tf32,
        reduced_precision_reduction=flags.reduced_precision_reduction,
        flush_subnormals=flags.flush_subnormals,
        backward=flags.backward,
        loss_scale=flags.loss_scale,
        device=flags.device,
        seed=flags.seed,
    )
    config = apply_overrides(load_config(source), overrides)
    if flags.show_config:
        as_json = outputs.stdout == "json"
        print_text(json.dumps(config_document(config), indent=2) + "\n" if as_json else show_config(config))
        return OK
    if config.batch is None:
        raise UsageError(f"there is no batch to replay; name one with --batch PATH, or with `batch:` in {source}")
    outputs.check(_inputs(source, config), checkpoints=[config.checkpoint.path] if config.checkpoint else ())
    progress = ConsoleProgress(show=outputs.terminal.stderr, quiet=outputs.quiet)
    try:
        for note in config.notes:
            progress.note(note)
        with user_code(silent=outputs.quiet and not flags.debug):
            before = time.perf_counter()
            from nanprobe.pipeline import replay_command

            report = replay_command(
                config,
                command=command,
                precisions=precisions,
                local_error=flags.local_error,
                operations=flags.operations,
                trust_pickle=flags.trust_pickle,
                overrides=_words(flags),
                progress=progress,
                started=started,
                import_seconds=time.perf_counter() - before,
            )
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    finally:
        progress.close()
    return outputs.deliver(report)


def _inputs(source: Path, config: Config) -> list[Path]:
    """Return every path that a replay reads from, the checkpoint's aside: a report must not be written there."""
    specs = (config.batch, config.model.transformers)
    paths = [source, *(spec.path for spec in specs if spec is not None)]
    for reference in (config.model.factory, config.loss.factory if config.loss is not None else None):
        where = (reference or "").rpartition(":")[0]
        if where.endswith(".py"):
            paths.append(config.folder / where)
        elif where:
            module = config.folder.joinpath(*where.split("."))
            paths += [module.with_name(f"{module.name}.py"), module / "__init__.py"]
    return paths


def _words(flags: Flags) -> tuple[str, ...]:
    """Return the flags that beat the config as they are typed, so that a report can say how to run it again."""
    words: list[str] = []
    for flag, value in (
        ("--checkpoint", flags.checkpoint),
        ("--batch", flags.batch),
        ("--mode", flags.mode),
        ("--autocast-policy", flags.autocast_policy),
        ("--attention", flags.attention),
        ("--fp8-scaling", flags.fp8_scaling),
        ("--loss-scale", flags.loss_scale),
        ("--device", flags.device),
        ("--seed", flags.seed),
    ):
        if value is not None:
            words += [flag, f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)]
    for name, switched in (
        ("backward", flags.backward),
        ("tf32", flags.tf32),
        ("reduced-precision-reduction", flags.reduced_precision_reduction),
        ("flush-subnormals", flags.flush_subnormals),
    ):
        if switched is not None:
            words.append(f"--{name}" if switched else f"--no-{name}")
    if flags.trust_pickle:
        words.append("--trust-pickle")
    return tuple(words)
