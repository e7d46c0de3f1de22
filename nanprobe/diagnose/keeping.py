"""The remedy of keeping modules in FP32, and what stands in for it where the whole model would be kept."""

from __future__ import annotations

from collections.abc import Sequence

from nanprobe.records import Remedy

__all__ = ["keep_in_fp32"]


def keep_in_fp32(modules: Sequence[str], *, between: bool = False) -> Remedy:
    """Return the remedy for a fault in ``modules`` (paths; "" is the model itself), ``between`` them included.

    Keeping the model itself would keep everything in FP32, so its own code is to be mended instead.
    """
    if "" in modules:
        return Remedy(
            kind="rewrite",
            text=(
                "Compute it in FP32 where the model's own code does it: cast its operands with .float(), with "
                "autocast off around it"
            ),
        )
    also = ", and what lies between them," if between else ""
    listed = ", ".join(f'"{module}"' for module in modules)
    text = f"Keep {' and '.join(modules)}{also} in FP32 (keep_fp32: [{listed}])"
    return Remedy(kind="keep-fp32", modules=tuple(modules), text=text)
