"""Laws of affine arithmetic, over every format, strategy, layout and symmetry."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphquant.numerics import QuantDtype, dequantize, fake_quantize, qparams_from_range, quantize
from graphquant.numerics.affine import clipped
from tests.numerics.sites import E4M3, E5M2, SCHEME_IDS, SCHEMES, SHAPES, SITES, sample

LAW = settings(deadline=None, max_examples=12)
TABLE_LAW = settings(deadline=None, max_examples=4)
DENORMAL, HUGE = torch.tensor([1e-44, 1e38]).tolist()
DEAD_STEP = torch.finfo(torch.float32).eps
EVERY_SCHEME = pytest.mark.parametrize(("dtype", "symmetric"), SCHEMES, ids=SCHEME_IDS)
SAMPLES = {
    "shape": st.sampled_from(SHAPES),
    "exponent": st.sampled_from((-148, -130, -126, -40, -24, -10, 0, 3, 16, 40, 110)),
    "seed": st.integers(0, 2**32 - 1),
}
reals = st.floats(-HUGE, HUGE, width=32, allow_subnormal=True)
_MANTISSA_BITS = {E4M3: 3, E5M2: 2}
_SUBNORMAL_STEP = {E4M3: 2.0**-9, E5M2: 2.0**-16}


def half_step(x: Tensor, scale: Tensor, dtype: QuantDtype) -> Tensor:
    """Largest rounding error of in-range values, with slack for the float32 products x · (1/s) and q · s."""
    x, scale = x.double().abs(), scale.double()
    if not dtype.is_float:
        return scale / 2 + scale * 2.0**-14
    relative = x * 2.0 ** -(_MANTISSA_BITS[dtype] + 1)
    return torch.maximum(relative, _SUBNORMAL_STEP[dtype] * scale / 2) + x * 2.0**-20 + 2.0**-149


def check_laws(x: Tensor, scale: Tensor, zero_point: Tensor, dtype: QuantDtype, where: str) -> None:
    """All laws of qparams that were made for the range of ``x``."""
    assert scale.dtype == torch.float32, where
    assert (torch.isfinite(scale) & (scale > 0)).all(), where
    assert zero_point.dtype == torch.int32, where
    assert ((zero_point >= dtype.qmin) & (zero_point <= dtype.qmax)).all(), where
    codes = quantize(x, scale, zero_point, dtype)
    assert codes.dtype == dtype.storage, where
    assert ((codes.float() >= dtype.qmin) & (codes.float() <= dtype.qmax)).all(), where
    once = fake_quantize(x, scale, zero_point, dtype)
    assert torch.equal(once, dequantize(codes, scale, zero_point, dtype, torch.float32)), where
    error = (once.double() - x.double()).abs()
    assert (error <= half_step(x, scale, dtype)).all(), where
    assert (once[x == 0] == 0).all(), where
    assert torch.equal(fake_quantize(once, scale, zero_point, dtype), once), where
    assert not clipped(x, scale, zero_point, dtype).any(), where
    zero = torch.zeros_like(x)
    assert torch.equal(fake_quantize(zero, scale, zero_point, dtype).abs(), zero), where


@EVERY_SCHEME
@given(**SAMPLES)
@TABLE_LAW
def test_every_strategy_keeps_in_range_values_within_half_a_step(
    dtype: QuantDtype, symmetric: bool, shape: str, exponent: int, seed: int
) -> None:
    for site in SITES:
        x = sample(site, shape, exponent, seed)
        check_laws(x, *site.qparams(x, dtype, symmetric), dtype, str(site))


@EVERY_SCHEME
@given(values=st.lists(reals, min_size=1, max_size=8))
@example(values=[0.0])
@example(values=[DENORMAL])
@example(values=[-DENORMAL, 0.0])
@example(values=[-HUGE, HUGE])
@example(values=[HUGE])
@example(values=[-HUGE, DENORMAL])
@example(values=[1.1754943508222875e-38, -1e-30])
@LAW
def test_every_range_of_float32_gives_usable_qparams(dtype: QuantDtype, symmetric: bool, values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    scale, zero_point = qparams_from_range(x.amin(), x.amax(), dtype, symmetric)
    check_laws(x, scale, zero_point, dtype, str(values))


@EVERY_SCHEME
@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=8),
    low=st.floats(-100, 0, width=32),
    high=st.floats(0, 100, width=32),
)
@LAW
def test_values_out_of_range_become_its_ends_and_are_counted_as_clipped(
    dtype: QuantDtype, symmetric: bool, values: list[float], low: float, high: float
) -> None:
    x = torch.tensor(sorted(values), dtype=torch.float32)
    scale, zero_point = qparams_from_range(torch.tensor(low), torch.tensor(high), dtype, symmetric)
    codes = torch.tensor([dtype.qmin, dtype.qmax]).to(dtype.storage)
    bottom, top = dequantize(codes, scale, zero_point, dtype, torch.float32)
    once = fake_quantize(x, scale, zero_point, dtype)
    assert ((once >= bottom) & (once <= top)).all()
    assert (once.diff() >= 0).all()
    beyond = torch.maximum(bottom - x, x - top)
    margin = torch.zeros(()) if dtype.is_float else scale / 2
    mask = clipped(x, scale, zero_point, dtype)
    assert mask[beyond > margin + scale * dtype.symmetric_bound * 2.0**-18].all()
    assert not mask[beyond < margin].any()
    assert torch.equal(once[mask], torch.where(x[mask] < 0, bottom, top))


@EVERY_SCHEME
@given(**SAMPLES)
@TABLE_LAW
def test_the_scale_follows_the_size_of_the_data(
    dtype: QuantDtype, symmetric: bool, shape: str, exponent: int, seed: int
) -> None:
    # A power of two is exact in float32: 4·x has 4·scale, the same zero point and the same codes.
    exponent = max(-40, min(exponent, 40))
    for site in SITES:
        x = sample(site, shape, exponent, seed)
        scale, zero_point = site.qparams(x, dtype, symmetric)
        larger, same = site.qparams(4 * x, dtype, symmetric)
        assert torch.equal(same, zero_point), str(site)
        assert torch.equal(larger, torch.where(scale == DEAD_STEP, scale, 4 * scale)), str(site)
        assert torch.equal(quantize(4 * x, larger, same, dtype).float(), quantize(x, scale, zero_point, dtype).float())


@pytest.mark.parametrize("real", [torch.bfloat16, torch.float16], ids=str)
@EVERY_SCHEME
@given(shape=st.sampled_from(SHAPES), exponent=st.integers(-6, 3), seed=st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=2)
def test_half_precision_keeps_its_dtype_and_has_float32_scales(
    dtype: QuantDtype, symmetric: bool, real: torch.dtype, shape: str, exponent: int, seed: int
) -> None:
    for site in SITES:
        x = sample(site, shape, exponent, seed).clamp(-100, 100).to(real)
        scale, zero_point = site.qparams(x, dtype, symmetric)
        wide_scale, wide_zero_point = site.qparams(x.float(), dtype, symmetric)
        assert scale.dtype == torch.float32
        assert torch.equal(scale, wide_scale)
        assert torch.equal(zero_point, wide_zero_point)
        once = fake_quantize(x, scale, zero_point, dtype)
        assert once.dtype == real
        assert torch.equal(once, fake_quantize(x.float(), scale, zero_point, dtype).to(real)), str(site)
        assert torch.equal(fake_quantize(once, scale, zero_point, dtype), once), str(site)
        assert (once[x == 0] == 0).all()
