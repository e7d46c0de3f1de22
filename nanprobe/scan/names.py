"""Names of one and the same tensor in two places: what wrappers put before them."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["fitting_prefixes"]

_PREFIXES = ("module.", "model.", "_orig_mod.", "_forward_module.", "net.", "module.model.", "state_dict.",
             "model_state_dict.", "model._orig_mod.", "base_model.model.", "transformer.")  # fmt: skip


def fitting_prefixes(names: Collection[str], wanted: Collection[str]) -> tuple[str, str]:
    """Return what to take off ``names`` and what to put before them so that most of them are among ``wanted``.

    Nothing is changed where that fits no fewer.
    """
    known = set(wanted)
    best, fitting = ("", ""), sum(name in known for name in names)
    for prefix in _PREFIXES:
        for strip, add in ((prefix, ""), ("", prefix)):
            fits = sum(name.startswith(strip) and add + name[len(strip) :] in known for name in names)
            if fits > fitting:
                best, fitting = (strip, add), fits
    return best
