"""Run every benchmark, the quick ones first: ``python -m benchmarks``, or ``python -m benchmarks startup lockstep``."""

from __future__ import annotations

import importlib
import sys

NAMES = ("startup", "lockstep", "planted", "scan", "half_products", "tolerances", "memory")


def main(names: list[str]) -> None:
    """Run the named benchmarks, or all of them."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise SystemExit(f"there is no benchmark {unknown[0]!r}; there are {', '.join(NAMES)}")
    for name in names or NAMES:
        print(f"== {name}")
        importlib.import_module(f"benchmarks.{name}").main([])


if __name__ == "__main__":
    main(sys.argv[1:])
