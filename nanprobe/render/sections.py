"""What follows the table: gradients, further findings, what to look at next, and how much was seen.

Each function returns finished sentences; a format only decides how a list of them looks.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping

from nanprobe.catalogue import ENTRIES
from nanprobe.records import Finding, GradientRow, Remedy, ReplayReport
from nanprobe.render import numbers
from nanprobe.render.ink import Ink
from nanprobe.render.lookup import candidates, divergence_of, is_culprit, path_of, spoken
from nanprobe.render.names import ROOT, visit_name
from nanprobe.render.sentences import joined

__all__ = ["conditions", "coverage", "findings", "gradients", "next_steps", "not_measured", "notes", "timings"]

_FEW = 4
_MOST_FINDINGS = 12
_MOST_EXPLAINED = 3
_CONDITIONS = ("mode", "train", "backward", "loss_scale", "keep_fp32", "seed", "emulated")
_TOLD_ELSEWHERE = ("autocast_policy", "notes")


def gradients(report: ReplayReport, ink: Ink, *, verbose: bool) -> list[str]:
    """Return how many parameters have bad or flushed gradients, and which; precisions that agree share a line."""
    alike: dict[str, list[str]] = {}
    for name in report.precisions if report.gradients else ():
        alike.setdefault(_gradient_words(report, name, ink, verbose), []).append(spoken(report, name))
    return [f"{joined(names)}: {words}" for words, names in alike.items()]


def findings(report: ReplayReport, ink: Ink, *, verbose: bool) -> list[str]:
    """Return a line for each finding that the verdict has not told already, worst first."""
    order = {"error": 0, "warning": 1, "note": 2}
    others = [finding for finding in report.findings if not is_culprit(report, finding)]
    others.sort(key=lambda finding: (finding.ignored, order.get(finding.severity, 3)))
    shown = others if verbose else others[:_MOST_FINDINGS]
    lines = [_finding_line(report, finding, ink) for finding in shown]
    if len(others) > len(shown):
        lines.append(f"{numbers.count(len(others) - len(shown))} more findings are shown by --verbose")
    return lines


def next_steps(report: ReplayReport, ink: Ink, *, folded: bool) -> list[str]:
    """Return what to try or look at next: the remedies offered, then commands; ``folded`` when rows were left out."""
    lines = [_remedy_line(remedy, ink) for remedy in _remedies(report)]
    if report.verdict == "clean":
        lines.append(_reproduce(report))
    if names := _explained(report):
        commands = [ink.command(f"nanprobe explain {name}") for name in names]
        lines.append(f"why this happens, and what does not help: {joined(commands)}")
    lines += _commands(report, ink, folded)
    return lines


def coverage(report: ReplayReport, ink: Ink, *, verbose: bool) -> str:
    """Return how much was observed: modules that ran, those that never did, outputs that could not be looked into."""
    seen = report.coverage
    bare = set(seen.not_callable)
    callable_ = seen.modules - len(bare)
    text = f"{numbers.of(seen.visited, callable_, 'module')} ran"
    if seen.visited == 0:
        text = f"none of {numbers.plural(callable_, 'module')} ran"
    if bare:
        text += f", not counting {numbers.plural(len(bare), 'list')} of modules"
    if never := [name for name in seen.never_visited if name not in bare]:
        text += f"; never: {_listed(never, ink, verbose)}"
    if seen.outputs_not_inspected:
        text += f"; outputs that could not be looked into: {_listed(seen.outputs_not_inspected, ink, verbose)}"
    else:
        text += "; every output was looked into"
    if seen.ops_outside_modules:
        text += f"; {numbers.plural(seen.ops_outside_modules, 'operation')} outside any module"
    return text


def conditions(report: ReplayReport, ink: Ink, *, verbose: bool) -> str:
    """Return under what conditions the figures came about; with ``verbose`` every one, and the environment."""
    given = report.conditions
    parts = []
    for key in _CONDITIONS:
        if given.get(key) is None or (key in ("loss_scale", "keep_fp32") and not given[key]):
            continue
        words = ink.prose(numbers.setting(given[key]))
        if key == "mode":
            policy = given.get("autocast_policy") if given[key] == "autocast" else None
            lists = f" with {ink.prose(numbers.setting(policy).upper())} operator lists" if policy else ""
            parts.append(f"{words}{lists}")
        elif key == "train":
            parts.append("train mode" if given[key] else "eval mode")
        elif key == "keep_fp32":
            parts.append(f"{words} kept in FP32")
        elif key == "emulated":
            parts.append(f"emulated: {words}" if given[key] else "nothing emulated")
        elif key == "loss_scale" and isinstance(given[key], Mapping):
            values = list(dict.fromkeys(given[key].values()))
            parts.append(f"loss scale {words if len(values) > 1 else ink.prose(numbers.setting(values[0]))}")
        elif key == "backward":
            parts.append("forward and backward" if given[key] else "forward only")
        else:
            parts.append(f"{key.replace('_', ' ')} {words}")
    if verbose:
        parts += [
            f"{ink.prose(key.replace('_', ' '))} {ink.prose(numbers.setting(value))}"
            for source in (given, report.environment)
            for key, value in source.items()
            if key not in _CONDITIONS + _TOLD_ELSEWHERE
        ]
    elif "device" in report.environment:
        parts.append(f"on {ink.prose(numbers.setting(report.environment['device']))}")
    return "; ".join(parts)


def notes(report: ReplayReport, ink: Ink) -> list[str]:
    """Return what the replay has to say about its own conditions, a sentence each."""
    given = report.conditions.get("notes")
    return [ink.prose(str(note)) for note in given] if isinstance(given, (list, tuple)) else []


def timings(report: ReplayReport, ink: Ink) -> str:
    """Return where the time went, stage by stage."""
    return ", ".join(f"{ink.prose(stage)} {numbers.seconds(value)}" for stage, value in report.timings.items())


def not_measured(report: ReplayReport, ink: Ink, *, verbose: bool) -> list[str]:
    """Return the reasons why visits have no figures, each once, with the modules it holds for."""
    reasons: dict[str, list[str]] = {}
    for row in report.modules:
        for measure in row.precisions.values():
            if measure.note:
                names = reasons.setdefault(measure.note, [])
                name = visit_name(row.module, row.visit)
                if name not in names:
                    names.append(name)
    return [f"{ink.prose(reason)}: {_listed(names, ink, verbose)}" for reason, names in reasons.items()]


def _gradient_words(report: ReplayReport, name: str, ink: Ink, verbose: bool) -> str:
    there = [row for row in report.gradients if name in row.precisions]
    absent = [row for row in report.gradients if name not in row.precisions]
    bad = [row for row in there if _bad(row, name)]
    flushed = [row for row in there if row.precisions[name].flushed]
    parts = []
    if bad:
        described = [f"{ink.name(row.parameter)} {_bad_words(row, name)}" for row in bad]
        # Where everything is bad, the first few names say nothing.
        which = "" if len(bad) == len(there) > _FEW and not verbose else f" ({_some(described, verbose)})"
        parts.append(f"{numbers.of(len(bad), len(there), 'parameter')} non-finite{which}")
    elif there:
        parts.append(f"{numbers.of(len(there), len(there), 'parameter')} finite")
    if flushed:
        flushed.sort(key=lambda row: -row.precisions[name].flushed / max(row.elements, 1))
        described = [
            f"{ink.name(row.parameter)} {numbers.of(row.precisions[name].flushed, row.elements)}" for row in flushed
        ]
        parts.append(
            f"{numbers.of(len(flushed), len(there), 'parameter')} with elements flushed to zero "
            f"({_some(described, verbose)})"
        )
    if absent:
        parts.append(f"{numbers.plural(len(absent), 'parameter')} without a gradient")
    return "; ".join(parts)


def _bad(row: GradientRow, name: str) -> bool:
    gradient = row.precisions[name]
    return bool(gradient.nan or gradient.posinf or gradient.neginf)


def _bad_words(row: GradientRow, name: str) -> str:
    gradient = row.precisions[name]
    return f"{numbers.kinds(gradient.nan, gradient.posinf, gradient.neginf)} of {row.elements:,}"


def _finding_line(report: ReplayReport, finding: Finding, ink: Ink) -> str:
    severity = "ignored" if finding.ignored else finding.severity
    text = f"{severity}: {ink.prose(finding.message)}"
    tags = [ink.prose(finding.rule)]
    if (
        finding.precision
        and finding.precision not in finding.message
        and finding.precision.upper() not in finding.message
    ):
        tags.append(spoken(report, finding.precision))
    if finding.module is not None and (finding.module or ROOT) not in finding.message:
        tags.append(ink.name(finding.module or ROOT))
    text += f" [{', '.join(tags)}]"
    if finding.ignored:
        text += f" (ignored: {ink.prose(finding.ignored_why)})" if finding.ignored_why else " (ignored by the config)"
    return text


def _remedies(report: ReplayReport) -> list[Remedy]:
    """Return every remedy offered, the culprits' first, each once."""
    found: list[Remedy] = []
    sources = [result.first_bad.remedies for result in report.precisions.values() if result.first_bad is not None]
    sources += [finding.remedies for finding in report.findings if not finding.ignored]
    for remedy in (remedy for source in sources for remedy in source):
        if remedy not in found:
            found.append(remedy)
    return found


def _remedy_line(remedy: Remedy, ink: Ink) -> str:
    text = ink.prose(remedy.text).rstrip(".")
    if not remedy.verified:
        return f"try: {text} (not verified)"
    left = "" if remedy.rel_error is None else f", rel. error of the output {numbers.error(remedy.rel_error)}"
    return f"works: {text} (verified by a replay{left})"


def _reproduce(report: ReplayReport) -> str:
    """Return what usually differs when a failure does not reproduce, from the conditions of this replay."""
    given = report.conditions
    differing = ["the weights of the step before the failure"]
    if isinstance(given.get("mode"), str):
        differing.append(f"the mode (this was {numbers.setting(given['mode'])})")
    if given.get("train") is not None:
        differing.append(f"train or eval (this was {'train' if given['train'] else 'eval'})")
    if not report.gradients:
        differing.append("the loss and the backward pass (this was forward only)")
    else:
        differing.append("the loss scale")
    if given.get("autocast_policy") == "cpu":
        differing.append("the device (autocast here follows the CPU's operator lists)")
    return "if the batch did fail in training, what differs? Usual suspects: " + joined(differing)


def _explained(report: ReplayReport) -> list[str]:
    """Return the names in the catalogue of what went wrong, the culprits' first, without what the config ignores."""
    names: list[str] = []
    for result in report.precisions.values():
        for place in (result.first_bad, divergence_of(result)) if result.verdict != "clean" else ():
            if place is not None and place.mechanism is not None:
                names.append(place.mechanism)
    for finding in sorted(report.findings, key=lambda finding: finding.severity != "error"):
        if not finding.ignored and finding.severity != "note":
            names.append(finding.mechanism or finding.rule)
    return [name for name in dict.fromkeys(names) if name in ENTRIES][:_MOST_EXPLAINED]


def _commands(report: ReplayReport, ink: Ink, folded: bool) -> list[str]:
    """Return commands that lead on from a config file, or what to call where the replay began in Python."""
    config = path_of(report, "config")
    if config is None:
        return [f"for every row, {ink.command('report.render(verbose=True)')}"] if folded else []
    low = candidates(report)
    tail = f" --config {shlex.quote(config)}"
    lines = []
    if report.command == "replay" and low == ["fp16"] and report.verdict == "precision":
        lines.append(f"does bf16 survive this batch? {ink.command('nanprobe compare-precisions' + tail)}")
    bad = report.first_bad
    keep = next((remedy for remedy in (bad.remedies if bad else ()) if remedy.kind == "keep-fp32"), None)
    if bad is not None and keep is not None and keep.modules and not keep.verified:
        listed = ", ".join(f'"{module}"' for module in keep.modules)
        again = ink.command(f"nanprobe replay{tail} --dtype {bad.precision}")
        lines.append(f"to check FP32 there, add {ink.command(f'keep_fp32: [{listed}]')} to the config and run {again}")
    if any(not result.completed for result in report.precisions.values()):
        lines.append(f"for the traceback, add {ink.command('--debug')}")
    if folded:
        lines.append(f"for every row, add {ink.command('--verbose')}")
    return lines


def _listed(names: Iterable[str], ink: Ink, verbose: bool) -> str:
    return _some([ink.name(name or ROOT) for name in names], verbose)


def _some(described: list[str], verbose: bool) -> str:
    """Return the first few of a list and how many more there are."""
    shown = described if verbose else described[:_FEW]
    more = len(described) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")
