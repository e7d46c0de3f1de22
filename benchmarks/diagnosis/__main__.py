"""Run every case, print a line for each and the shares; with ``--peers`` what other tools name beside it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.diagnosis import ours
from benchmarks.diagnosis.answers import Answer
from benchmarks.diagnosis.case import Control, Fault
from benchmarks.diagnosis.cases import CONTROLS, FAULTS
from benchmarks.diagnosis.known import KNOWN
from benchmarks.diagnosis.peers import PEERS
from benchmarks.diagnosis.peers.plain import Missing
from benchmarks.diagnosis.score import QUESTIONS, REQUIRED, Marks, judged, shares
from benchmarks.diagnosis.table import lines

Tool = Callable[[Fault | Control], Answer]


def _tools(wanted: bool) -> dict[str, Tool]:
    tools: dict[str, Tool] = {"nanprobe": ours.answer}
    for name, tool in PEERS.items() if wanted else ():
        try:
            tool(CONTROLS[0])
        except Missing as missing:
            print(f"{name} is left out: {missing}")
        else:
            tools[name] = tool
    return tools


def _shown(fault: Fault, answer: Answer, marks: Marks) -> str:
    expected = fault.expected
    lines = [f"WRONG {fault.family}/{fault.name}: {', '.join(marks.wrong)}"]
    for question in marks.wrong:
        value = getattr(expected, question)
        wanted = " or ".join(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
        lines.append(f"    {question}: expected {wanted}, got {getattr(answer, question)!r}")
    if fault.name in KNOWN:
        lines.append(f"    known: {KNOWN[fault.name].why}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; the exit code is 1 when a required share is missed or a control is called a fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis", description=__doc__)
    parser.add_argument("--peers", action="store_true", help="run the other tools on the same cases as well")
    parser.add_argument("--only", default="", help="only cases whose name or family contains this")
    parser.add_argument("-o", dest="page", type=Path, help="write the table to this Markdown file")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    faults = [fault for fault in FAULTS if options.only in f"{fault.family}/{fault.name}"]
    controls = [case for case in CONTROLS if options.only in f"{case.family}/{case.name}"]
    answers: dict[str, dict[str, Answer]] = {}
    marks: dict[str, dict[str, Marks]] = {}
    for name, tool in _tools(options.peers).items():
        answers[name] = {case.name: tool(case) for case in (*faults, *controls)}
        marks[name] = {f.name: judged(f, answers[name][f.name], peer=name != "nanprobe") for f in faults}
    for fault in faults:
        if marks["nanprobe"][fault.name].wrong:
            print(_shown(fault, answers["nanprobe"][fault.name], marks["nanprobe"][fault.name]))
    failed = False
    for case in controls:
        if answers["nanprobe"][case.name].errors:
            failed = True
            print(f"FALSE ALARM {case.name}: {answers['nanprobe'][case.name]}")
    print(f"\n{len(faults)} faults, {len(controls)} controls, {time.perf_counter() - started:.0f} s")
    for name in marks:
        alarms = sum(answers[name][case.name].errors > 0 for case in controls)
        found = shares(marks[name].values())
        figures = ", ".join(f"{q} {right}/{asked}" for q, (right, asked) in found.items() if asked)
        print(f"{name}: {figures}; false alarms on {alarms}/{len(controls)} controls")
    if faults:
        found = shares(marks["nanprobe"].values())
        for question, required in REQUIRED.items():
            right, asked = found[question]
            if asked and right < required * asked:
                failed = True
                print(f"{question}: {right / asked:.1%} right, {required:.0%} required")
    if options.page is not None:
        options.page.write_text("\n".join(lines(faults, controls, answers, marks)) + "\n", encoding="utf-8")
        print(f"wrote {options.page}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

__all__ = ["QUESTIONS", "main"]
