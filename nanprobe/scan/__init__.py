"""Scanning checkpoints: every tensor counted once, every rule a function of counts, names and roles.

The flow is plan (which bytes), measure (counts, in threads), look (a second look at single tensors), rules (findings).
None of it needs torch, and nothing that a file holds is executed.
"""

from __future__ import annotations

from nanprobe.scan.scanner import CASTS, DEFAULT_CASTS, ScanOptions, checked_casts, scan

__all__ = ["CASTS", "DEFAULT_CASTS", "ScanOptions", "checked_casts", "scan"]
