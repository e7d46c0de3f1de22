"""``mindstudio-probe``: dumped statistics of functions and modules, and its check for the first anomaly among them."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.diagnosis.answers import NO_ANSWER, Answer
from benchmarks.diagnosis.case import Control, Fault
from benchmarks.diagnosis.peers.plain import Missing, low_precision
from benchmarks.diagnosis.peers.words import aten_names

__all__ = ["answer"]

_FOLDER = tempfile.TemporaryDirectory(prefix="peers-msprobe-")
_steps = 0


@functools.cache
def _debugger() -> tuple[Any, Any]:
    """Return the process's one debugger and the class of the check; statistics of modules and functions."""
    try:
        from msprobe.overflow_check.analyzer import OverFlowCheck
        from msprobe.pytorch import PrecisionDebugger
    except ImportError as error:
        raise Missing(f"mindstudio-probe is not installed ({error}): pip install 'nanprobe[peers]'") from error
    config = Path(_FOLDER.name, "config.json")
    statistics = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    document = {"task": "statistics", "dump_path": f"{_FOLDER.name}/dump", "rank": [], "step": [], "level": "mix"}
    config.write_text(json.dumps({**document, "statistics": statistics}))
    logging.getLogger("msprobe").setLevel(logging.ERROR)
    return PrecisionDebugger(config_path=str(config)), OverFlowCheck


def answer(case: Fault | Control) -> Answer:
    """Dump forward, loss and backward, run ``overflow_check`` on the dump and read the first entry of its result."""
    global _steps
    silence = contextlib.redirect_stdout(io.StringIO())
    with silence:
        debugger, check = _debugger()
        with low_precision(case) as run:
            note = ""
            debugger.start(model=run.model)
            try:
                run.backward(run.loss(run.forward()))
            except Exception as error:  # what the probe or the model raises is its answer
                note = f"{type(error).__name__}: {error}"
            debugger.stop()
            debugger.step()
        dump, result = Path(_FOLDER.name, "dump", f"step{_steps}"), Path(_FOLDER.name, "result", str(_steps))
        _steps += 1
        if not dump.exists():
            return Answer(found=False, note=note or "nothing was dumped")
        result.parent.mkdir(exist_ok=True)
        check(str(dump), str(result)).analyze()
    for file in sorted(result.glob("*.json")) if result.exists() else ():
        for nodes in json.loads(file.read_text()).values():
            return _read(nodes[0]["op_name"], next(dump.glob("*/construct.json")))
    return NO_ANSWER if not note else Answer(found=False, note=note)


def _read(name: str, construct: Path) -> Answer:
    """Read ``Module.layers.2.Linear.forward.0``, or ``Tensor.mul.3.forward`` with what the dump says is around it."""
    phase = "backward" if ".backward" in name or "grad" in name else "forward"
    if name.startswith("Module."):
        return Answer(found=True, phase=phase, module=_path(name), errors=1)
    parent = json.loads(construct.read_text()).get(name)
    module = _path(parent) if parent else ""
    return Answer(found=True, phase=phase, module=module, ops=aten_names(name.split(".")[1]), errors=1)


def _path(name: str) -> str:
    return ".".join(name.split(".")[1:-3])
