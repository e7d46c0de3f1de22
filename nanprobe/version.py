"""The version of nanprobe, in the one place that the build and the reports read it from."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
