"""What follows the table: gradients, further findings, what to look at next, and how much was seen.

Each function returns finished sentences; a format only decides how a list of them looks.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping

from nanprobe.catalogue import ENTRIES
from nanprobe.records import Finding, GradientRow, Remedy, ReplayReport
from nanprobe.render import numbers
from nanprobe.render.ink import Ink
from nanprobe.render.lookup import candidates, divergence_of, is_culprit, path_of, spoken, worst_at_fault
from nanprobe.render.names import ROOT, visit_name
from nanprobe.render.sentences import joined

__all__ = ["conditions", "coverage", "findings", "gradients", "next_steps", "not_measured", "notes", "timings"]

_FEW = 4
_MOST_FINDINGS = 12
_MOST_EXPLAINED = 3
_CONDITIONS = ("mode", "train", "backward", "loss_scale", "keep_fp32", "seed", "emulated")
_TOLD_ELSEWHERE = ("autocast_policy", "notes")
_KEEP = "keep-fp32"
_REPAIRS = ("fix-data", "fix-checkpoint")
"""Remedies that change what is replayed, so that no replay of it could verify them."""

_NOT_ROUNDING = ("routing-flip", "gradient-underflow")
"""Mechanisms of a drift that FP32 in that module does not help against."""

_WITHOUT_SETTING = re.compile(r" \(keep_fp32: \[[^\]]*\]\)")
"""The setting inside a remedy's text: it is written out behind the text, with the command."""


def gradients(report: ReplayReport, ink: Ink, *, verbose: bool) -> list[str]:
    """Return how many parameters have bad or flushed gradients, and which; precisions that agree share a line."""
    alike: dict[str, list[str]] = {}
    for name in report.precisions if report.gradients else ():
        alike.setdefault(_gradient_words(report, name, ink, verbose), []).append(spoken(report, name))
    return [f"{joined(names)}: {words}" for words, names in alike.items()]


def findings(report: ReplayReport, ink: Ink, *, verbose: bool) -> list[str]:
    """Return a line for each finding that the verdict has not told already, worst first."""
    order = {"error": 0, "warning": 1, "note": 2}
    groups: list[list[Finding]] = []
    for finding in report.findings:
        if is_culprit(report, finding):
            continue
        alike = next((group for group in groups if _says_the_same(group[0], finding)), None)
        if alike is None:
            groups.append([finding])
        else:
            alike.append(finding)
    others = sorted(groups, key=lambda group: (group[0].ignored, order.get(group[0].severity, 3)))
    shown = others if verbose else others[:_MOST_FINDINGS]
    lines = [_finding_line(report, group, ink) for group in shown]
    if len(others) > len(shown):
        lines.append(f"{numbers.count(len(others) - len(shown))} more findings are shown by --verbose")
    return lines


def next_steps(report: ReplayReport, ink: Ink, *, folded: bool) -> list[str]:
    """Return what to try or look at next: the remedies offered, then commands; ``folded`` when rows were left out."""
    lines = [_remedy_line(report, remedy, ink) for remedy in _remedies(report)]
    if report.verdict == "clean" and not report.conditions.get("keep_fp32"):
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
    if never := [name for name in seen.never_visited if name not in bare]:
        text += f"; never: {_listed(never, ink, verbose)}"
    if bare:
        lists = "list of modules has" if len(bare) == 1 else "lists of modules have"
        text += f"; {len(bare):,} {lists} no forward of {'its' if len(bare) == 1 else 'their'} own"
    if seen.outputs_not_inspected:
        text += f"; outputs that could not be looked into: {_listed(seen.outputs_not_inspected, ink, verbose)}"
    else:
        text += "; every output was looked into"
    if seen.ops_outside_modules:
        text += f"; {numbers.plural(seen.ops_outside_modules, 'operation')} outside any module"
    return text


def conditions(report: ReplayReport, ink: Ink, *, verbose: bool) -> str:
    """Return under what conditions the figures came about; with ``verbose`` every one, and the environment.

    Where nothing but references ran, the mode made no difference and is left out.
    """
    given = {key: value for key, value in report.conditions.items() if key not in _idle_conditions(report)}
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
            whole = "" in given[key]
            parts.append("the whole model kept in FP32" if whole else f"{words} kept in FP32")
        elif key == "emulated":
            parts.append(f"emulated, not run natively: {words}" if given[key] else "nothing emulated")
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
    if not isinstance(given, (list, tuple)):
        return []
    idle = "mode" in _idle_conditions(report)
    return [ink.prose(str(note)) for note in given if not (idle and str(note).startswith("autocast "))]


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
        which = f" ({_some(described, verbose)})"
        if len(bad) > max(len(there) / 2, _FEW):
            # Where most are bad their names say little; those that are not bad say more.
            finite = [ink.name(row.parameter) for row in there if not _bad(row, name)]
            which = f" (finite: {_some(finite, verbose)})" if finite else ""
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


def _says_the_same(one: Finding, other: Finding) -> bool:
    """Whether two findings differ in nothing that is shown but their precision."""
    keys = ("rule", "severity", "message", "module", "ignored", "ignored_why")
    return all(getattr(one, key) == getattr(other, key) for key in keys)


def _finding_line(report: ReplayReport, group: list[Finding], ink: Ink) -> str:
    """Return one line for findings that say the same of several precisions."""
    finding = group[0]
    severity = "ignored" if finding.ignored else finding.severity
    text = f"{severity}: {ink.prose(finding.message)}"
    tags = [ink.prose(finding.rule)]
    tags += [
        spoken(report, name)
        for name in dict.fromkeys(other.precision for other in group)
        if name and name not in finding.message and name.upper() not in finding.message
    ]
    if finding.module is not None and (finding.module or ROOT) not in finding.message:
        tags.append(ink.name(finding.module or ROOT))
    text += f" [{', '.join(tags)}]"
    if finding.ignored:
        text += f" (ignored: {ink.prose(finding.ignored_why)})" if finding.ignored_why else " (ignored by the config)"
    return text


def _remedies(report: ReplayReport) -> list[Remedy]:
    """Return every remedy offered, the culprits' first, each once.

    A precision that drifts away and has no remedy of its own can be kept in FP32 where it drifts.
    """
    found: list[Remedy] = []
    sources = [result.first_bad.remedies for result in report.precisions.values() if result.first_bad is not None]
    sources += [finding.remedies for finding in report.findings if not finding.ignored]
    drifts = [drift for result in report.precisions.values() if (drift := divergence_of(result)) is not None]
    sources += [
        (Remedy(kind=_KEEP, text=f"Keep {drift.module} in FP32", modules=(drift.module,)),)
        for drift in drifts
        if drift.module and drift.phase == "forward" and drift.mechanism not in _NOT_ROUNDING
    ]
    told: set[tuple[str, tuple[str, ...] | str]] = set()
    for remedy in (remedy for source in sources for remedy in source):
        key = (remedy.kind, remedy.modules or remedy.text)
        if key not in told:
            told.add(key)
            found.append(remedy)
    return found


def _remedy_line(report: ReplayReport, remedy: Remedy, ink: Ink) -> str:
    text = ink.prose(_WITHOUT_SETTING.sub("", remedy.text)).rstrip(".")
    if remedy.kind in _REPAIRS:
        return f"try: {text}"
    if not remedy.verified:
        return f"try: {text} (not verified){_how_to_keep(report, remedy, ink)}"
    left = "" if remedy.rel_error is None else f", rel. error of the output {numbers.error(remedy.rel_error)}"
    return f"works: {text} (verified by a replay{left})"


def _how_to_keep(report: ReplayReport, remedy: Remedy, ink: Ink) -> str:
    """Return how modules are kept in FP32: the setting, and the command that shows whether it helps."""
    if remedy.kind != _KEEP or not remedy.modules:
        return ""
    listed = "[" + ", ".join(f'"{module}"' for module in remedy.modules) + "]"
    tail = _arguments(report, without=("--dtype", "--dtypes"))
    if tail is None:
        return f": pass {ink.command(f'keep_fp32={listed}')}"
    low = _precision_of(report, remedy)
    again = ink.command(f"nanprobe replay{tail} --dtype {low}")
    return f": add {ink.command(f'keep_fp32: {listed}')} to the config and run {again}"


def _precision_of(report: ReplayReport, remedy: Remedy) -> str:
    """Return the precision that a remedy is for: one that goes wrong in its modules, the worst before others."""
    worst = worst_at_fault(report)
    ordered = [*([worst] if worst else []), *candidates(report)]
    for name in ordered:
        place = report.precisions[name].first_bad or report.precisions[name].first_divergence
        if place is not None and place.module in remedy.modules:
            return name
    return ordered[0] if ordered else report.reference


def _arguments(report: ReplayReport, *, without: tuple[str, ...] = ()) -> str | None:
    """Return the config and the overrides as they were typed, for another command; None without a config.

    ``without`` names overrides that the other command is given anew.
    """
    config = path_of(report, "config")
    if config is None:
        return None
    given = report.subject.get("overrides")
    words = [str(word) for word in given] if isinstance(given, (list, tuple)) else []
    kept: list[str] = []
    at = 0
    while at < len(words):
        if words[at] in without:
            at += 2
            continue
        if words[at].partition("=")[0] not in without:
            kept.append(words[at])
        at += 1
    return "".join(f" {shlex.quote(word)}" for word in ["--config", config, *kept])


def _idle_conditions(report: ReplayReport) -> tuple[str, ...]:
    """Return the conditions that made no difference: without a low precision nothing is cast."""
    full = all(name in ("fp32", "fp64") for name in report.precisions)
    return ("mode", "autocast_policy") if full else ()


def _reproduce(report: ReplayReport) -> str:
    """Return what usually differs when a failure does not reproduce, from the conditions of this replay."""
    given = {key: value for key, value in report.conditions.items() if key not in _idle_conditions(report)}
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
    tail = _arguments(report, without=("--dtype", "--dtypes"))
    if tail is None:
        return [f"for every row, {ink.command('report.render(verbose=True)')}"] if folded else []
    low = candidates(report)
    lines = []
    if report.command == "replay" and low == ["fp16"] and report.verdict == "precision":
        lines.append(f"does bf16 survive this batch? {ink.command('nanprobe compare-precisions' + tail)}")
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
