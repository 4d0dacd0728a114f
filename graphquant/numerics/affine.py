r"""Affine arithmetic: range → scale and zero point → codes → values.

    q  = clamp(round(x · (1/s)) + z, qmin, qmax)        integers, round half to even
    q  = cast(clamp(x · (1/s), qmin, qmax))             fp8, rounded by the cast
    x̂  = (q − z) · s

``x · (1/s)`` in float32 is the form of torch's ``quantized_decomposed`` ops; the exported graph, the eager
fake-quant and those ops therefore agree code for code. ``s`` is the real value of one code step.
"""

from typing import Any

import torch
from torch import Tensor

from graphquant.errors import StrategyError
from graphquant.numerics.dtypes import QuantDtype

DEAD_STEP = torch.finfo(torch.float32).eps
"""Scale of a range that is exactly zero: the value compressed-tensors uses, so that 0 stays 0 and 1/s is finite."""
SMALLEST_STEP = torch.finfo(torch.float32).tiny
"""The smallest normal float32: a positive range never gets a scale below it, so that 1/s is finite."""


def qparams_from_range(low: Tensor, high: Tensor, dtype: QuantDtype, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale (float32) and zero point (int32), both of the range's shape.

    Symmetric: s = max(|low|, |high|) / ``dtype.symmetric_bound``. Asymmetric: the range is first widened to hold 0,
    s = (high − low)/(qmax − qmin), z = clamp(qmin − round(low/s), qmin, qmax), and 0 for an empty range
    (compressed-tensors' formulas).

    Raises:
        StrategyError: asymmetric fp8, which has no zero point.
    """
    low, high = low.float().clamp(max=0.0), high.float().clamp(min=0.0)
    if symmetric:
        amax = torch.maximum(-low, high)
        scale = _positive(amax / dtype.symmetric_bound, amax)
        return scale, torch.full_like(scale, dtype.symmetric_zero_point, dtype=torch.int32)
    if dtype.is_float:
        raise StrategyError(f"{dtype.name} has no zero point: an asymmetric scheme needs an int or uint type")
    # Halves are subtracted so that a range wider than float32's largest value does not overflow.
    span = (high / 2 - low / 2) / ((dtype.qmax - dtype.qmin) / 2)
    extent = high - low
    scale = _positive(span, extent)
    zero_point = torch.clamp(dtype.qmin - torch.round(low / scale), dtype.qmin, dtype.qmax)
    # Any code can stand for the 0 of an empty range; compressed-tensors takes 0.
    return scale, torch.where(extent == 0, torch.zeros_like(zero_point), zero_point).to(torch.int32)


def _positive(scale: Tensor, extent: Tensor) -> Tensor:
    """Replace the step of an empty range by ``DEAD_STEP`` and one that underflowed by ``SMALLEST_STEP``; NaN stays."""
    return torch.where(extent == 0, torch.full_like(scale, DEAD_STEP), scale.clamp(min=SMALLEST_STEP))


def dynamic_qparams(x: Tensor, dtype: QuantDtype, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point of every token, ``[..., 1]``, from the values themselves (strategy ``token``)."""
    return qparams_from_range(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), dtype, symmetric)


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, dtype: QuantDtype) -> Tensor:
    """Codes of ``x`` in ``dtype.storage``; ``scale`` and ``zero_point`` broadcast against ``x``."""
    scaled = x.float() * scale.reciprocal()
    if not dtype.is_float:
        scaled = torch.round(scaled) + zero_point
    return torch.clamp(scaled, dtype.qmin, dtype.qmax).to(dtype.storage)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor, dtype: QuantDtype, out_dtype: torch.dtype) -> Tensor:
    """Real values of codes, computed in float32 and cast to ``out_dtype``."""
    values = codes.float()
    if not dtype.is_float:
        values = values - zero_point
    return (values * scale).to(out_dtype)


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, dtype: QuantDtype) -> Tensor:
    """Quantize and dequantize ``x``, keeping its dtype; the gradient passes straight through where not clipped."""
    result: Tensor = _FakeQuantize.apply(x, scale, zero_point, dtype)  # type: ignore[no-untyped-call]
    return result


def clipped(x: Tensor, scale: Tensor, zero_point: Tensor, dtype: QuantDtype) -> Tensor:
    """Which values lie more than half a step outside the codes (integers) or beyond the largest value (fp8)."""
    code = x.float() * scale.reciprocal() + zero_point
    slack = 0.0 if dtype.is_float else 0.5
    # One part in 2^20 keeps the float32 rounding of amax · (1/s) from counting amax itself.
    slack += dtype.symmetric_bound * 2.0**-20
    return (code < dtype.qmin - slack) | (code > dtype.qmax + slack)


class _FakeQuantize(torch.autograd.Function):
    """Straight-through estimator: forward is exact (no x + (fq − x) rounding), backward masks what was clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, dtype: QuantDtype) -> Tensor:
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(~clipped(x, scale, zero_point, dtype))
        return dequantize(quantize(x, scale, zero_point, dtype), scale, zero_point, dtype, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        (inside,) = ctx.saved_tensors
        return grads[0] * inside, None, None, None
