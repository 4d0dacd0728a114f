"""Error metrics as running sums, so that batches and shards add up to the figure of their concatenation.

SQNR in dB is 10 · log10( Σ x² / Σ (x − x̂)² ), infinite where nothing was lost.
"""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ErrorSums:
    """Sums over the values of one site: count, clipped, Σx², Σ(x−x̂)², max |x−x̂|, max |x|."""

    count: int = 0
    clipped: int = 0
    signal: float = 0.0
    noise: float = 0.0
    max_abs_error: float = 0.0
    amax: float = 0.0

    @classmethod
    def of(cls, x: Tensor, quantized: Tensor, clipped: Tensor) -> "ErrorSums":
        """Sums of one batch: ``x`` and its fake-quantized values, both of one shape, and a bool mask of the clipped."""
        real = x.double()
        error = quantized.double() - real
        if real.numel() == 0:
            return cls()
        return cls(
            count=real.numel(),
            clipped=int(clipped.sum()),
            signal=float(real.square().sum()),
            noise=float(error.square().sum()),
            max_abs_error=float(error.abs().amax()),
            amax=float(real.abs().amax()),
        )

    def __add__(self, other: "ErrorSums") -> "ErrorSums":
        return ErrorSums(
            count=self.count + other.count,
            clipped=self.clipped + other.clipped,
            signal=self.signal + other.signal,
            noise=self.noise + other.noise,
            max_abs_error=max(self.max_abs_error, other.max_abs_error),
            amax=max(self.amax, other.amax),
        )

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise, dB."""
        if self.noise == 0.0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf

    @property
    def clipped_percent(self) -> float:
        """Share of values outside the representable range, percent."""
        return 100.0 * self.clipped / self.count if self.count else 0.0
