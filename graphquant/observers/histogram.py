"""Percentile and MSE ranges, both from one signed logarithmic histogram per head and channel.

The bins are fixed (16 to an octave, |x| from 2⁻²⁴ to 2¹⁶, one bin for what is smaller), so counts of batches, shards
and channels simply add: merge equals concatenation exactly, whatever the order or split, and every static strategy,
bit width and symmetry follows from one calibration. A bin is at most 6 % wide; within it values are taken as spread
evenly. A site whose values all lie below 2⁻²⁰ has no useful bins and gets its exact min and max.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graphquant.numerics import QuantDtype, fake_quantize, qparams_from_range
from graphquant.observers.base import Grain, Observer, State, check_number

_PER_OCTAVE_BITS = 4
_LOW_EXPONENT, _HIGH_EXPONENT = -24, 16
_BASE = (127 + _LOW_EXPONENT) << _PER_OCTAVE_BITS
HALF_BINS = ((_HIGH_EXPONENT - _LOW_EXPONENT) << _PER_OCTAVE_BITS) + 1
BINS = 2 * HALF_BINS
_SMALLEST_USEFUL = 2.0**-20
_SUBPOINTS = 4


def _edges() -> Tensor:
    """Bin edges of |x|, ``[HALF_BINS + 1]``: 0, then 2⁻²⁴ … 2¹⁶ in steps of 1/16 of an octave's mantissa."""
    bits = torch.arange(_BASE, _BASE + HALF_BINS, dtype=torch.int32) << (23 - _PER_OCTAVE_BITS)
    return torch.cat([torch.zeros(1), bits.view(torch.float32)])


EDGES = _edges()


def bin_index(x: Tensor) -> Tensor:
    """Bin of each value: ``[0, HALF_BINS)`` for x ≥ 0 and ``[HALF_BINS, BINS)`` for x < 0, small to large |x|."""
    bits = x.float().abs().contiguous().view(torch.int32) >> (23 - _PER_OCTAVE_BITS)
    return (bits - _BASE + 1).clamp(0, HALF_BINS - 1).to(torch.int64) + (x < 0) * HALF_BINS


@dataclass(frozen=True)
class HistogramObserver(Observer):
    """Shared state of the histogram observers: ``counts`` ``[H, D, BINS]`` beside min and max."""

    def init(self, grain: Grain) -> dict[str, Tensor]:
        """Min and max as ever, and an empty histogram."""
        state = super().init(grain)
        return state | {"counts": torch.zeros(*state["min"].shape, BINS, dtype=torch.int32)}

    def _update(self, state: State, rows: Tensor, low: Tensor, high: Tensor, grain: Grain) -> dict[str, Tensor]:
        channels = low.numel()
        flat = bin_index(rows.reshape(-1, channels)) + torch.arange(channels, device=rows.device) * BINS
        counts = torch.bincount(flat.flatten(), minlength=channels * BINS)
        return {"counts": state["counts"] + counts.view_as(state["counts"]).to(torch.int32)}

    def _merge(self, earlier: State, later: State) -> dict[str, Tensor]:
        return {"counts": earlier["counts"] + later["counts"]}


def _values(counts: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Representative values ``[U, BINS·k + 2]`` and their weights for U scales, every value within [low, high].

    The two extremes are known exactly and leave their bins: on heavy-tailed data they are most of an fp8 error.
    """
    ends = torch.stack([high, low], dim=-1)
    once = torch.stack([torch.ones_like(high), (low < high).to(high.dtype)], dim=-1).double()
    counts = counts.double().scatter_add(1, bin_index(ends), -once)
    steps = (torch.arange(_SUBPOINTS, device=counts.device) + 0.5) / _SUBPOINTS
    edges = EDGES.to(counts.device)
    points = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * steps
    signed = torch.cat([points, -points]).flatten()
    weights = (counts / _SUBPOINTS).repeat_interleave(_SUBPOINTS, dim=-1)
    within = torch.minimum(torch.maximum(signed.expand_as(weights), low[:, None]), high[:, None])
    return torch.cat([within, ends], dim=-1), torch.cat([weights, once], dim=-1)


def _usable(low: Tensor, high: Tensor) -> Tensor:
    amax = torch.maximum(-low, high)
    return (amax > _SMALLEST_USEFUL) & (amax < 2.0**_HIGH_EXPONENT)


@dataclass(frozen=True)
class PercentileObserver(HistogramObserver):
    """Range that holds ``percentile`` percent of the values: of |x| when symmetric, at either end when not."""

    percentile: float = 99.99

    name = "percentile"

    def __post_init__(self) -> None:
        check_number(self.name, "percentile", self.percentile, 50.0, 100.0)

    def range(self, state: State, grain: Grain, dtype: QuantDtype, symmetric: bool) -> tuple[Tensor, Tensor]:
        """Quantiles of the histogram, clamped to the exact min and max."""
        low, high = grain.amin(state["min"]), grain.amax(state["max"])
        counts = grain.sum(state["counts"].to(torch.int64)).reshape(-1, BINS)
        above, below = counts[:, :HALF_BINS], counts[:, HALF_BINS:]
        share = self.percentile / 100.0
        if symmetric:
            top = _quantile(above + below, share).view_as(high)
            bottom = -top
        else:
            top = _signed_quantile(above, below, share).view_as(high)
            bottom = -_signed_quantile(below, above, share).view_as(low)
        keep = _usable(low, high)
        return torch.where(keep, torch.maximum(bottom, low), low), torch.where(keep, torch.minimum(top, high), high)


def _quantile(counts: Tensor, share: float | Tensor) -> Tensor:
    """Quantile of |x| for every row of ``[U, HALF_BINS]``, linear within its bin; ``share`` a number or ``[U, 1]``."""
    cumulative = counts.double().cumsum(-1)
    wanted = cumulative[:, -1:] * share
    at = torch.searchsorted(cumulative, wanted).clamp(max=HALF_BINS - 1)
    inside = counts.double().gather(1, at)
    before = cumulative.gather(1, at) - inside
    edges = EDGES.to(counts.device)
    fraction = ((wanted - before) / inside.clamp(min=1.0)).clamp(0.0, 1.0)
    return (edges[at] + (edges[at + 1] - edges[at]) * fraction).squeeze(1).float()


def _signed_quantile(toward: Tensor, away: Tensor, share: float) -> Tensor:
    """Quantile toward one sign: how far out ``share`` of all values lie; 0 where it falls among the other sign."""
    total, outer = (toward + away).sum(-1, keepdim=True).double(), toward.sum(-1, keepdim=True).double()
    within = ((share * total - (total - outer)) / outer.clamp(min=1.0)).clamp(0.0, 1.0)
    return _quantile(toward, within)


@dataclass(frozen=True)
class MSEObserver(HistogramObserver):
    """Range that loses least: the min/max range shrunk by the factor whose mean squared error is smallest."""

    grid: int = 100
    max_shrink: float = 0.8

    name = "mse"

    def __post_init__(self) -> None:
        check_number(self.name, "grid", self.grid, 1, 10_000)
        check_number(self.name, "max_shrink", self.max_shrink, 0.0, 0.99)

    def range(self, state: State, grain: Grain, dtype: QuantDtype, symmetric: bool) -> tuple[Tensor, Tensor]:
        """Search the factors 1 … 1 − max_shrink; a tie keeps the wider range."""
        low, high = grain.amin(state["min"]).flatten(), grain.amax(state["max"]).flatten()
        values, weights = _values(grain.sum(state["counts"].to(torch.int64)).reshape(-1, BINS), low, high)
        filled = weights.any(0)  # most of the bins lie far outside one site's octaves
        values, weights = values[:, filled], weights[:, filled]
        best, factor = torch.full_like(low, torch.inf, dtype=torch.float64), torch.ones_like(low)
        for step in range(int(self.grid) + 1):
            shrink = 1.0 - self.max_shrink * step / self.grid
            scale, zero_point = qparams_from_range(low * shrink, high * shrink, dtype, symmetric)
            quantized = fake_quantize(values, scale[:, None], zero_point[:, None], dtype)
            error = ((quantized - values).double().square() * weights).sum(-1)
            factor = torch.where(error < best, shrink, factor)
            best = torch.minimum(error, best)
        factor = torch.where(_usable(low, high), factor, torch.ones_like(factor))
        return (low * factor).view(grain.shape), (high * factor).view(grain.shape)
