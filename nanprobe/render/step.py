"""What became of the gradients: norm, clipping, the optimizer's step and the loss scale, in sentences."""

from __future__ import annotations

from nanprobe.records import ReplayReport, Step
from nanprobe.render import numbers
from nanprobe.render.ink import Ink
from nanprobe.render.lookup import spoken

__all__ = ["step_lines"]


_WORTH_TELLING = 0.01
"""Share of the updates that are lost from which they are told."""


def step_lines(report: ReplayReport, ink: Ink) -> list[str]:
    """Return one line for each precision, if gradients were clipped or stepped on or a loss scale was looked for."""
    steps = {name: result.step for name, result in report.precisions.items() if result.step is not None}
    asked = any(s.total_norm is not None or s.taken or s.error or s.scale_window is not None for s in steps.values())
    return [f"{spoken(report, name)}: {'; '.join(_words(step, ink))}" for name, step in steps.items() if asked]


def _words(step: Step, ink: Ink) -> list[str]:
    words: list[str] = []
    if step.error is not None:
        words.append(ink.prose(step.error))
    if step.total_norm is not None:
        words.append(f"total gradient norm {numbers.magnitude(step.total_norm)}, {_clipped(step.clip_coefficient)}")
    elif step.gradient_norm is not None:
        words.append(f"total gradient norm {numbers.magnitude(step.gradient_norm)}")
    else:
        words.append("gradients are NaN or Inf")
    if step.zero_share:
        words.append(f"{_share(step.zero_share)} of the gradient elements are zero")
    if step.skipped:
        words.append("a gradient scaler skips the step")
    elif step.taken:
        words.append(f"the step changes {numbers.of(step.changed, step.elements)}")
        if step.lost >= _WORTH_TELLING * step.moved > 0:
            words.append(f"{step.lost:,} of {step.moved:,} updates are lost to rounding")
    if step.next_scale is not None and step.loss_scale is not None:
        same = step.next_scale == step.loss_scale
        words.append(f"loss scale {step.loss_scale:g}" + (" stays" if same else f" becomes {step.next_scale:g}"))
    if step.scale_window is not None:
        words.append(_window(step.scale_window, step.window_share))
    return words


def _clipped(coefficient: float | None) -> str:
    if coefficient is None:
        return "not clipped"
    return "not clipped" if coefficient == 1.0 else f"gradients multiplied by {numbers.magnitude(coefficient)}"


def _share(share: float) -> str:
    """Return a share as a percentage that is 0 or 100 only if it is exactly so."""
    if share in (0.0, 1.0):
        return f"{share:.0%}"
    return "under 0.1%" if share < 0.001 else "over 99.9%" if share > 0.999 else f"{share:.1%}"


def _window(window: tuple[float, ...], share: float | None) -> str:
    lost = f"more than {share:.0%} of the gradient elements" if share is not None else "gradient elements"
    if not window:
        return f"no loss scale serves: each overflows or loses {lost}"
    low, high = window[0], window[-1]
    if low == high:
        return f"loss scale {low:,.0f} serves, and no other power of two"
    return f"loss scales from {low:,.0f} to {high:,.0f} serve"
