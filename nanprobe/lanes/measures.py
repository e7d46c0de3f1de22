"""Summing the statistics of several tensors into the measure of one visit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from nanprobe.formats import NumberFormat
from nanprobe.lanes.memo import StorageWeakRef
from nanprobe.lanes.trace import BadDetail, Health, SampleDetail
from nanprobe.numerics.stats import Difference, TensorStats, format_of, mask_fill, total_difference
from nanprobe.records import Measure, OutputMeasure

__all__ = ["MeasureBuilder", "bad_detail", "health_of"]


def health_of(stats: list[TensorStats], lost: int = 0) -> Health:
    """Sum the non-finite counts of several tensors."""
    return Health(
        nan=sum(s.nan for s in stats),
        posinf=sum(s.posinf for s in stats),
        neginf=sum(s.neginf for s in stats),
        lost=lost,
    )


def bad_detail(
    path: str,
    tensor: torch.Tensor,
    *,
    reference: torch.Tensor | None = None,
    batch_size: int | None = None,
    batch_dim: int = 0,
    input_absmax: float | None = None,
    gradient: bool = False,
) -> BadDetail | None:
    """Describe the non-finite elements of ``tensor``; None when it has none.

    A -Inf that the reference has in the same place, or that stands for a mask's fill there, is not counted unless
    there is nothing else; in a ``gradient`` every -Inf counts. ``reference_absmax`` is the largest finite magnitude
    that the reference holds at the counted elements. Samples are positions along ``batch_dim``; where that
    dimension is k x ``batch_size`` long, row r belongs to sample r // k.
    """
    values = tensor.detach()
    if values.is_nested or values.layout is not torch.strided or values.is_quantized:
        return None
    if values.is_complex():
        values = torch.view_as_real(values).sum(dim=-1)
    exact = None
    if reference is not None and reference.shape == tensor.shape and reference.layout is torch.strided:
        exact = reference.detach()
        exact = torch.view_as_real(exact).sum(dim=-1) if exact.is_complex() else exact
    bad = ~torch.isfinite(values)
    masked = torch.isneginf(values) if not gradient else torch.zeros_like(bad)
    if exact is not None:
        masked = masked & (torch.isneginf(exact) | (exact <= mask_fill(exact.dtype)))
    counted = bad & ~masked
    only_masked = not bool(counted.any())
    bad = counted if not only_masked else _rows_lost(bad, values, exact)
    count = int(torch.count_nonzero(bad))
    if count == 0:
        return None
    first = int(torch.nonzero(bad.reshape(-1))[0])
    reference_absmax, reference_bad = None, 0
    if exact is not None:
        there = exact[bad].to(torch.float64)
        finite = there[torch.isfinite(there)]
        reference_absmax = float(finite.abs().max()) if finite.numel() else None
        reference_bad = there.numel() - finite.numel()
    by_sample = None
    if batch_size and values.dim() > batch_dim and values.shape[batch_dim]:
        by_sample = _by_sample(bad, exact, batch_size, batch_dim)
    return BadDetail(
        path=path,
        dtype=str(tensor.dtype).removeprefix("torch."),
        count=count,
        elements=values.numel(),
        index=_unravel(first, values.shape),
        samples=tuple(part.sample for part in by_sample) if by_sample is not None else None,
        reference_absmax=reference_absmax,
        reference_bad=reference_bad,
        input_absmax=input_absmax,
        by_sample=by_sample or (),
        only_masked=only_masked,
    )


def _rows_lost(bad: torch.Tensor, values: torch.Tensor, exact: torch.Tensor | None) -> torch.Tensor:
    """Return those -Inf that the reference lacks and that leave their row without a finite element, else all."""
    if exact is None or values.dim() == 0:
        return bad
    lost = bad & torch.isfinite(exact) & ~torch.isfinite(values).any(dim=-1, keepdim=True)
    return lost if bool(lost.any()) else bad


def _unravel(flat: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape)) if len(shape) else ()


def _by_sample(
    bad: torch.Tensor, exact: torch.Tensor | None, batch_size: int, batch_dim: int
) -> tuple[SampleDetail, ...] | None:
    """Tell the samples apart; None when the batch dimension is no multiple of the batch size."""
    rows = bad.shape[batch_dim]
    if rows % batch_size:
        return None
    moved = bad.movedim(batch_dim, 0)
    flat = moved.reshape(batch_size, -1)
    counts = flat.sum(dim=1)
    firsts = flat.to(torch.uint8).argmax(dim=1)
    if exact is not None:
        there = exact.movedim(batch_dim, 0).reshape(batch_size, -1).to(torch.float64)
        finite = torch.isfinite(there)
        largest = torch.where(flat & finite, there.abs(), -1.0).amax(dim=1).tolist()
        too = (flat & ~finite).sum(dim=1).tolist()
    parts = []
    for sample in torch.nonzero(counts).reshape(-1).tolist():
        index = list(_unravel(sample * flat.shape[1] + int(firsts[sample]), moved.shape))
        index.insert(batch_dim, index.pop(0))
        reference_absmax = largest[sample] if exact is not None and largest[sample] >= 0 else None
        parts.append(
            SampleDetail(
                sample=sample,
                count=int(counts[sample]),
                index=tuple(index),
                reference_absmax=reference_absmax,
                reference_bad=too[sample] if exact is not None else 0,
            )
        )
    return tuple(parts)


@dataclass(slots=True)
class MeasureBuilder:
    """Gathers the tensors of one visit in one lane, then builds the frozen :class:`~nanprobe.records.Measure`."""

    stats: list[tuple[str, TensorStats, Difference | None]] = field(default_factory=list)
    fmt: NumberFormat | None = None
    local: list[Difference] = field(default_factory=list)
    scale: float = 1.0
    note: str | None = None
    detail: BadDetail | None = None
    storages: list[StorageWeakRef] = field(default_factory=list)

    def add(self, path: str, tensor: torch.Tensor, stats: TensorStats, diff: Difference | None) -> None:
        """Add one tensor's statistics and its difference from the reference's tensor."""
        if self.fmt is None and stats.floating:
            self.fmt = format_of(tensor.dtype)
        self.stats.append((path, stats, diff))

    @property
    def is_bad(self) -> bool:
        """Whether any element of any tensor so far is NaN or Inf."""
        return any(stats.bad for _, stats, _ in self.stats)

    def build(self) -> Measure:
        """Return the measure: counts summed over tensors, extremes and errors over the floating ones, unscaled."""
        if len(self.stats) == 1:
            return self._single()
        floating = [entry for entry in self.stats if entry[1].floating] or self.stats
        if not floating:
            return Measure(dtype="", shape=(), elements=0, note=self.note or "no tensor in the output")
        all_stats = [s for _, s, _ in floating]
        unscale = 1.0 / self.scale
        lows = [s.low for s in all_stats if s.low is not None]
        highs = [s.high for s in all_stats if s.high is not None]
        finite = sum(s.finite for s in all_stats)
        low = min(lows) if lows else None
        high = max(highs) if highs else None
        absmax = max(abs(low), abs(high)) if low is not None and high is not None else None
        headroom = None
        if self.fmt is not None and absmax:
            headroom = math.log2(self.fmt.max / absmax)
        diffs = [d for _, s, d in floating if d is not None and s.floating]
        outputs: tuple[OutputMeasure, ...] = ()
        if len(self.stats) > 1:
            outputs = tuple(
                OutputMeasure(
                    path=path,
                    dtype=s.dtype,
                    shape=s.shape,
                    elements=s.elements,
                    absmax=None if s.absmax is None else s.absmax * unscale,
                    nan=s.nan,
                    posinf=s.posinf,
                    neginf=s.neginf,
                    rel_error=d.rel_error if d is not None and s.floating else None,
                )
                for path, s, d in self.stats
            )
        return Measure(
            dtype=all_stats[0].dtype,
            shape=all_stats[0].shape,
            elements=sum(s.elements for s in all_stats),
            absmax=None if absmax is None else absmax * unscale,
            min=None if low is None else low * unscale,
            max=None if high is None else high * unscale,
            mean=sum(s.total for s in all_stats) / finite * unscale if finite else None,
            rms=math.sqrt(sum(s.squares for s in all_stats) / finite) * unscale if finite else None,
            nan=sum(s.nan for s in all_stats),
            posinf=sum(s.posinf for s in all_stats),
            neginf=sum(s.neginf for s in all_stats),
            zero=sum(s.zero for s in all_stats),
            subnormal=sum(s.subnormal for s in all_stats),
            headroom_bits=headroom,
            rel_error=total_difference(diffs).rel_error,
            local_error=total_difference(self.local).rel_error,
            first_index=self.detail.index if self.detail else None,
            samples=self.detail.samples if self.detail else None,
            outputs=outputs,
            note=self.note,
        )

    def _single(self) -> Measure:
        """Build the measure of a visit with one tensor, by far the most common."""
        _, stats, diff = self.stats[0]
        unscale = 1.0 / self.scale
        absmax, finite = stats.absmax, stats.finite
        return Measure(
            dtype=stats.dtype,
            shape=stats.shape,
            elements=stats.elements,
            absmax=None if absmax is None else absmax * unscale,
            min=None if stats.low is None else stats.low * unscale,
            max=None if stats.high is None else stats.high * unscale,
            mean=stats.total / finite * unscale if finite else None,
            rms=math.sqrt(stats.squares / finite) * unscale if finite else None,
            nan=stats.nan,
            posinf=stats.posinf,
            neginf=stats.neginf,
            zero=stats.zero,
            subnormal=stats.subnormal,
            headroom_bits=math.log2(self.fmt.max / absmax) if self.fmt is not None and absmax else None,
            rel_error=diff.rel_error if diff is not None and stats.floating else None,
            local_error=total_difference(self.local).rel_error if self.local else None,
            first_index=self.detail.index if self.detail else None,
            samples=self.detail.samples if self.detail else None,
            note=self.note,
        )
