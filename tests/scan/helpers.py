"""Checkpoints in a temporary folder, scanned, and what was found in them by rule and tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nanprobe.scan import ScanOptions, scan
from nanprobe.scan_records import ScanFinding, ScanReport


def scanned(path: Path | str, **options: Any) -> ScanReport:
    """Scan one path."""
    return scan([str(path)], ScanOptions(**options))


def weights(
    folder: Path, tensors: dict[str, torch.Tensor], name: str = "model.safetensors", **options: Any
) -> ScanReport:
    """Save tensors as safetensors and scan the file."""
    path = folder / name
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
    return scanned(path, **options)


def saved(folder: Path, tree: Any, name: str = "checkpoint.pt", **options: Any) -> ScanReport:
    """Save an object tree with torch and scan the file."""
    path = folder / name
    torch.save(tree, path)
    return scanned(path, **options)


def found(report: ScanReport, rule: str, *, notes: bool = False) -> list[ScanFinding]:
    """Return the findings of a rule; notes only where they are asked for."""
    return [one for one in report.findings if one.rule == rule and (notes or one.severity != "note")]


def only(report: ScanReport, rule: str, *, notes: bool = False) -> ScanFinding:
    """Return the one finding of a rule."""
    findings = found(report, rule, notes=notes)
    assert len(findings) == 1, [(one.rule, one.tensor, one.severity, one.message) for one in report.findings]
    return findings[0]


def worth_a_word(report: ScanReport) -> list[tuple[str, str | None]]:
    """Return rule and tensor of everything but notes."""
    return [(one.rule, one.tensor) for one in report.findings if one.severity != "note"]


def normal(*shape: int, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    """Weights as initialisation makes them."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


class Adam:
    """The parts of an Adam checkpoint of one matrix and one bias, to be damaged one by one."""

    def __init__(self, steps: int = 3) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(8, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.randn(5, 8)).square().sum().backward()
            self.optimizer.step()

    def tree(self) -> dict[str, Any]:
        """Return the checkpoint; its tensors are those of the optimizer."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def state(self, parameter: int, name: str) -> torch.Tensor:
        """Return one state of parameter 0 (weight) or 1 (bias)."""
        held = self.optimizer.state_dict()["state"][parameter][name]
        assert isinstance(held, torch.Tensor)
        return held
