"""Putting a finding together: the numbers that show it, in the words of the report, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanprobe.scan.subject import Tensor
from nanprobe.scan_records import ScanFinding

__all__ = ["REMEDIES", "counted", "file_finding", "tensor_finding"]

REMEDIES: Mapping[str, str] = {
    "nonfinite-weight": "go back to the last checkpoint without it; replay the step after that one to see its origin",
    "nonfinite-optimizer-state": "reset this state or go back to an earlier checkpoint: resuming spreads it to weights",
    "negative-second-moment": "its square root is NaN: reset this state or go back to an earlier checkpoint",
    "zero-second-moment": "keep second moments in FP32: the update divides by eps alone there",
    "step-stalled": "keep the counter in FP32 or as an integer; bias correction depends on it",
    "nonfinite-scalar": "go back to a checkpoint from before that step",
    "cast-overflow": "keep this tensor in FP32, or use bf16, whose range is that of FP32",
    "cast-underflow": "keep this tensor in FP32, or use bf16, whose range is that of FP32",
    "near-limit": "one more doubling overflows: watch this tensor, or keep it in FP32",
    "subnormal": "compare it with the source that it was exported from: this often is a write that went wrong",
    "all-zero": "compare it with the source that it was exported from, and check the file's hash",
    "constant": "check that it was initialised and trained",
    "outlier": "compare it with an earlier checkpoint: a single flipped bit does this",
    "loss-scale-collapsed": "gradients overflow at every scale: find the first bad step; a fresh scaler only hides it",
    "loss-scale-nonfinite": "start with a fresh loss scaler",
    "loss-scale-absent": "save the scaler's state_dict() too, or resuming starts at the initial scale and skips steps",
    "tied-mismatch": "find out which of the two was trained, and save that one only",
    "dtype-mismatch": "convert it, or say the type that is stored",
    "dead-rows": "check for pruning, dead units or a partial write",
    "ema-mismatch": "rebuild the average from the model",
    "storage-bloat": "save tensor.clone() instead of the view",
    "learning-rate": "check the schedule before resuming",
    "missing-key": "check the model's configuration, or strip the prefix of the checkpoint's names",
    "unexpected-key": "check the model's configuration, or strip the prefix of the checkpoint's names",
    "shape-mismatch": "check the model's configuration against the one that was trained",
    "missing-shard": "fetch the missing files again",
    "truncated-file": "copy or download it again",
    "corrupt-file": "copy or download it again, and compare its hash",
    "index-mismatch": "fetch index and shards of one and the same revision",
    "unsafe-pickle": "do not load it with a reader that trusts pickles; ask its author for safetensors",
}
"""What to do, by rule."""


def counted(tensor: Tensor, **more: Any) -> dict[str, Any]:
    """Return the evidence of a finding about a tensor: its elements, what is given, and its raw key if it has one."""
    evidence: dict[str, Any] = {"elements": tensor.entry.elements}
    evidence.update((key, value) for key, value in more.items() if value is not None)
    if tensor.entry.key is not None or tensor.role.role in ("moment", "step"):
        evidence["key"] = tensor.entry.key or tensor.name
    return evidence


def tensor_finding(
    tensor: Tensor, rule: str, severity: str, message: str, evidence: Mapping[str, Any], remedy: str | None = None
) -> ScanFinding:
    """Return a finding about one tensor."""
    return ScanFinding(
        rule=rule,
        severity=severity,
        message=message,
        file=tensor.entry.file,
        tensor=tensor.name,
        dtype=tensor.entry.dtype,
        shape=tensor.entry.shape,
        evidence=evidence,
        remedy=remedy or REMEDIES.get(rule),
    )


def file_finding(
    file: str, rule: str, severity: str, message: str, evidence: Mapping[str, Any] | None = None,
    remedy: str | None = None,
) -> ScanFinding:  # fmt: skip
    """Return a finding about a file, or about something in it that is no tensor."""
    return ScanFinding(
        rule=rule,
        severity=severity,
        message=message,
        file=file,
        evidence=dict(evidence or {}),
        remedy=remedy or REMEDIES.get(rule),
    )
