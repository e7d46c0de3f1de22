"""nanprobe: where and why a mixed-precision training step goes bad.

Everything here is loaded when it is first asked for, so that ``import nanprobe`` and the parts that read and render
saved reports need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanprobe.version import __version__

if TYPE_CHECKING:
    from nanprobe.api import compare_precisions, replay
    from nanprobe.report import Report, load_report
    from nanprobe.scanning import diff_checkpoints, scan_checkpoint

__all__ = [
    "Report",
    "__version__",
    "compare_precisions",
    "diff_checkpoints",
    "load_report",
    "replay",
    "scan_checkpoint",
]

_HOMES = {
    "Report": "nanprobe.report",
    "compare_precisions": "nanprobe.api",
    "diff_checkpoints": "nanprobe.scanning",
    "load_report": "nanprobe.report",
    "replay": "nanprobe.api",
    "scan_checkpoint": "nanprobe.scanning",
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it, on first use."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'nanprobe' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted(__all__)
