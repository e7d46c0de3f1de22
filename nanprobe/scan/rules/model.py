"""Rules that compare the checkpoint with the model that a config describes: names and shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nanprobe.nearest import nearest
from nanprobe.scan.names import fitting_prefixes
from nanprobe.scan.rules.finding import counted, file_finding, tensor_finding
from nanprobe.scan.subject import Subject
from nanprobe.scan_records import ScanFinding

__all__ = ["ModelShape", "judge_model"]

_MOST_HINTS = 20
"""Names for which the most similar one is looked up; that takes as long as all other rules over ten tensors."""

ModelShape = Mapping[str, tuple[tuple[int, ...], str]]
"""Name of each tensor of the model's state dict: its shape, and a label that tied names share."""


def judge_model(subject: Subject, model: ModelShape) -> Iterator[ScanFinding]:
    """Yield keys that the model has and the checkpoint lacks, the reverse, and shapes that differ."""
    present = {
        tensor.name: tensor for tensor in subject.tensors if tensor.role.role in ("weight", "buffer", "scale")
    }  # fmt: skip
    strip, add = fitting_prefixes(present, model)
    fitted = {add + name.removeprefix(strip): tensor for name, tensor in present.items() if name.startswith(strip)}
    hints = 0
    lacking = [key for key in model if key not in fitted]
    loaded = {label for name, (_, label) in model.items() if name in fitted}
    for name, (shape, label) in model.items():
        tensor = fitted.get(name)
        if tensor is None:
            # safetensors leaves out all but one of the names that are tied.
            if label not in loaded:
                hints += 1
                yield _missing(subject, name, shape, list(fitted) if hints <= _MOST_HINTS else ())
        elif tensor.entry.shape != shape:
            message = f"its shape is {list(tensor.entry.shape)}, the model's {list(shape)}"
            yield tensor_finding(tensor, "shape-mismatch", "error", message, counted(tensor, expected=list(shape)))
    for name, tensor in fitted.items():
        if name not in model:
            hints += 1
            close = nearest(name, lacking) if hints <= _MOST_HINTS else None
            hint = f"; the model has {close}" if close else ""
            yield tensor_finding(
                tensor, "unexpected-key", "warning", f"the model has no such tensor{hint}", counted(tensor)
            )


def _missing(subject: Subject, name: str, shape: tuple[int, ...], there: Sequence[str]) -> ScanFinding:
    close = nearest(name, there)
    hint = f"; the nearest that is there is {close}" if close else ""
    found = file_finding(
        subject.index.path, "missing-key", "warning", f"the model has {name}, the checkpoint does not{hint}",
        {"key": name},
    )  # fmt: skip
    return ScanFinding(
        rule=found.rule, severity=found.severity, message=found.message, file=found.file, tensor=name, shape=shape,
        evidence=found.evidence, remedy=found.remedy,
    )  # fmt: skip
