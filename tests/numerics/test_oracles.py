"""Arithmetic against torch's own operators, and against the numbers measured in the field."""

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphquant.errors import StrategyError
from graphquant.numerics import (
    QuantDtype,
    TensorLayout,
    dequantize,
    expand_qparam,
    fake_quantize,
    qparams_from_range,
    quantize,
    reduce_stat,
)
from tests.numerics.sites import E4M3, E5M2, INT4, INT8, INTEGERS, UINT8, Site, sample

qd = torch.ops.quantized_decomposed
EPS = torch.finfo(torch.float32).eps
LOWS, HIGHS = torch.tensor([-1.0, 0.5, 0.0, -3.0]), torch.tensor([2.0, 4.0, 0.0, -1.0])
INTEGER_SCHEMES = pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
EVERY_INTEGER = pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: dtype.name)
PER_AXIS = [
    (Site(TensorLayout("projection", 2, 8), "channel"), 2),
    (Site(TensorLayout("projection", 2, 8), "attn_head_channel"), 2),
    (Site(TensorLayout("states", 2, 8), "channel"), 3),
    (Site(TensorLayout("states", 2, 8), "attn_head"), 1),
]
SEEDS = st.integers(0, 2**32 - 1)


def range_of(site: Site, x: Tensor) -> tuple[Tensor, Tensor]:
    """Half of the site's own range, so that some values are clipped."""
    rows = site.layout.rows(x).flatten(0, 1)
    args = (site.layout, site.strategy, site.group_size)
    return reduce_stat(rows.amin(0), *args, "amin") / 2, reduce_stat(rows.amax(0), *args, "amax") / 2


@EVERY_INTEGER
@INTEGER_SCHEMES
@given(seed=SEEDS, exponent=st.integers(-30, 30))
@settings(deadline=None, max_examples=10)
def test_per_tensor_equals_torchs_operators_code_for_code(
    dtype: QuantDtype, symmetric: bool, seed: int, exponent: int
) -> None:
    site = Site(TensorLayout("states", 2, 8), "tensor")
    x = sample(site, "normal", exponent, seed)
    scale, zero_point = qparams_from_range(*range_of(site, x), dtype, symmetric)
    ends = (int(dtype.qmin), int(dtype.qmax))
    # x · (1/s) and x / s round to different codes at some of the ties, so the values include all of them.
    x = torch.cat([x.flatten(), (torch.arange(-300.0, 300.0) + 0.5) * scale])
    args = (scale.item(), int(zero_point.item()), *ends, dtype.storage)
    codes = quantize(x, scale, zero_point, dtype)
    assert torch.equal(codes, qd.quantize_per_tensor(x, *args))
    for real in (torch.float32, torch.bfloat16):
        mine = dequantize(codes, scale, zero_point, dtype, real)
        assert torch.equal(mine, qd.dequantize_per_tensor(codes, *args, out_dtype=real))
    theirs = torch.fake_quantize_per_tensor_affine(x, scale.item(), int(zero_point.item()), *ends)
    assert torch.equal(fake_quantize(x, scale, zero_point, dtype), theirs)


@EVERY_INTEGER
@INTEGER_SCHEMES
@given(seed=SEEDS, exponent=st.integers(-30, 30))
@settings(deadline=None, max_examples=5)
def test_per_channel_equals_torchs_operators_code_for_code(
    dtype: QuantDtype, symmetric: bool, seed: int, exponent: int
) -> None:
    ends = (int(dtype.qmin), int(dtype.qmax))
    for site, axis in PER_AXIS:
        x = sample(site, "normal", exponent, seed)
        scale, zero_point = qparams_from_range(*range_of(site, x), dtype, symmetric)
        scales, zero_points = scale.flatten(), zero_point.flatten()
        codes = quantize(x, scale, zero_point, dtype)
        args = (scales, zero_points, axis, *ends, dtype.storage)
        assert torch.equal(codes, qd.quantize_per_channel(x, *args)), str(site)
        for real in (torch.float32, torch.bfloat16):
            mine = dequantize(codes, scale, zero_point, dtype, real)
            assert torch.equal(mine, qd.dequantize_per_channel(codes, *args, out_dtype=real)), str(site)
        theirs = torch.fake_quantize_per_channel_affine(x, scales, zero_points, axis, *ends)
        assert torch.equal(fake_quantize(x, scale, zero_point, dtype), theirs), str(site)


def test_a_projections_head_scale_equals_per_channel_with_that_scale_repeated() -> None:
    site = Site(TensorLayout("projection", 2, 8), "attn_head")
    x = sample(site, "normal", 0, 1)
    scale, zero_point = qparams_from_range(*range_of(site, x), INT8, symmetric=False)
    assert scale.shape == (2,)
    wide = [expand_qparam(param, site.layout, "attn_head", None) for param in (scale, zero_point)]
    by_hand = [torch.cat([param[:1].expand(8), param[1:].expand(8)]) for param in (scale, zero_point)]
    assert torch.equal(quantize(x, *wide, INT8), qd.quantize_per_channel(x, *by_hand, 2, -128, 127, torch.int8))


@pytest.mark.parametrize(
    ("dtype", "symmetric", "scales", "zero_points"),
    [
        (INT8, True, [0.015686275, 0.031372551, EPS, 0.023529412], [0, 0, 0, 0]),
        (INT8, False, [0.011764706, 0.015686275, EPS, 0.011764706], [-43, -128, 0, 127]),
        (INT4, True, [0.26666668, 0.53333336, EPS, 0.4], [0, 0, 0, 0]),
        (INT4, False, [0.2, 0.26666668, EPS, 0.2], [-3, -8, 0, 7]),
        (E4M3, True, [0.004464286, 0.008928572, EPS, 0.006696429], [0, 0, 0, 0]),
        (E5M2, True, [2 / 57344, 4 / 57344, EPS, 3 / 57344], [0, 0, 0, 0]),
        (UINT8, True, [0.015686275, 0.031372551, EPS, 0.023529412], [128, 128, 128, 128]),
    ],
    ids=["int8-sym", "int8-asym", "int4-sym", "int4-asym", "e4m3", "e5m2", "uint8-sym"],
)
def test_measured_scales_and_zero_points(
    dtype: QuantDtype, symmetric: bool, scales: list[float], zero_points: list[int]
) -> None:
    scale, zero_point = qparams_from_range(LOWS, HIGHS, dtype, symmetric)
    torch.testing.assert_close(scale, torch.tensor(scales), rtol=2**-23, atol=0)
    assert zero_point.tolist() == zero_points


def test_amax_of_0_3_gives_its_own_scale_not_1() -> None:
    for amax in (1e-6, 0.3, 1.0, 7e4):
        scale, _ = qparams_from_range(torch.tensor(-amax), torch.tensor(amax / 2), INT8, symmetric=True)
        assert scale.item() == pytest.approx(amax / 127.5, rel=2**-23)


@EVERY_INTEGER
@INTEGER_SCHEMES
def test_a_range_wider_than_the_largest_float32_has_a_finite_scale(dtype: QuantDtype, symmetric: bool) -> None:
    low, high = torch.tensor(-3e38), torch.tensor(3e38)
    scale, _ = qparams_from_range(low, high, dtype, symmetric)
    assert scale.item() == pytest.approx(6e38 / (dtype.qmax - dtype.qmin))


def test_integers_round_half_to_even_and_saturate() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, 127.4, 127.6, -128.4, -200.0])
    codes = quantize(x, torch.tensor(1.0), torch.tensor(0, dtype=torch.int32), INT8)
    assert codes.tolist() == [0, 2, 2, 0, 127, 127, -128, -128]


def test_ties_round_before_an_odd_zero_point_is_added() -> None:
    # round(x/s) + zp as torch's per-tensor ops have it; round(x/s + zp) would give [2, 2, 4].
    codes = quantize(torch.tensor([0.5, 1.5, 2.5]), torch.tensor(1.0), torch.tensor(1, dtype=torch.int32), INT8)
    assert codes.tolist() == [1, 3, 3]


def test_fp8_rounds_by_its_cast_and_saturates() -> None:
    x = torch.tensor([0.3, 17.0, 450.0, 500.0, -449.0, 1e-4])
    one, zero = torch.tensor(1.0), torch.tensor(0, dtype=torch.int32)
    assert fake_quantize(x, one, zero, E4M3).tolist() == [0.3125, 16.0, 448.0, 448.0, -448.0, 0.0]
    wide = torch.tensor([0.3, 17.0, 60000.0, -1e6, 2.0**-17 + 2.0**-20])
    assert fake_quantize(wide, one, zero, E5M2).tolist() == [0.3125, 16.0, 57344.0, -57344.0, 2.0**-16]
    # Fractions survive: rounding to integers first (as quantized_decomposed does with fp8) would lose them.
    assert quantize(torch.tensor(0.3125), one, zero, E4M3).float().item() == 0.3125


def test_states_0_to_23_have_the_measured_ranges_per_tensor_and_per_head() -> None:
    layout, x = TensorLayout("states", 2, 4), torch.arange(24.0).view(1, 2, 3, 4)
    finest = layout.rows(x).flatten(0, 1)
    for strategy, lows, highs in (("tensor", [0.0], [23.0]), ("attn_head", [0.0, 12.0], [11.0, 23.0])):
        low = reduce_stat(finest.amin(0), layout, strategy, None, "amin")
        high = reduce_stat(finest.amax(0), layout, strategy, None, "amax")
        assert low.flatten().tolist() == lows
        assert high.flatten().tolist() == highs
        scale, _ = qparams_from_range(low, high, INT4, symmetric=True)
        assert scale.flatten().tolist() == pytest.approx([top / 7.5 for top in highs], rel=1e-6)


@INTEGER_SCHEMES
@EVERY_INTEGER
def test_a_dead_head_stays_zero_beside_a_live_one(dtype: QuantDtype, symmetric: bool) -> None:
    for kind in ("projection", "states"):
        for strategy, group in (("attn_head", None), ("attn_head_channel", None), ("group", 4), ("token", None)):
            site = Site(TensorLayout(kind, 2, 8), strategy, group)
            x = sample(site, "dead_head", 0, 3)
            once = site.layout.rows(fake_quantize(x, *site.qparams(x, dtype, symmetric), dtype))
            assert torch.isfinite(once).all(), str(site)
            assert (once[:, :, 0] == 0).all(), str(site)
            assert (once[:, :, 1] != 0).any(), str(site)


@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=lambda dtype: dtype.name)
def test_asymmetric_fp8_is_refused(fp8: QuantDtype) -> None:
    with pytest.raises(StrategyError) as refusal:
        qparams_from_range(LOWS, HIGHS, fp8, symmetric=False)
    assert str(refusal.value) == f"{fp8.name} has no zero point: an asymmetric scheme needs an int or uint type"
