"""Error metrics: sums of the parts are the sums of the whole."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphquant.numerics import ErrorSums, fake_quantize, qparams_from_range
from graphquant.numerics.affine import clipped
from tests.numerics.sites import INT4


def sums(x: torch.Tensor) -> ErrorSums:
    scale, zero_point = qparams_from_range(torch.tensor(-1.0), torch.tensor(1.0), INT4, symmetric=True)
    return ErrorSums.of(x, fake_quantize(x, scale, zero_point, INT4), clipped(x, scale, zero_point, INT4))


@given(seed=st.integers(0, 2**32 - 1), cuts=st.lists(st.integers(0, 100), max_size=4))
@settings(deadline=None, max_examples=30)
def test_sums_of_the_parts_are_the_sums_of_the_whole(seed: int, cuts: list[int]) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(seed))
    ends = [0, *sorted(cuts), 100]
    total = ErrorSums()
    for start, stop in pairwise(ends):
        total += sums(x[start:stop])
    whole = sums(x)
    assert (total.count, total.clipped) == (whole.count, whole.clipped)
    assert (total.max_abs_error, total.amax) == (whole.max_abs_error, whole.amax)
    assert total.signal == pytest.approx(whole.signal, rel=1e-12)
    assert total.noise == pytest.approx(whole.noise, rel=1e-12)
    assert total.sqnr_db == pytest.approx(whole.sqnr_db, abs=1e-9)
    assert total.clipped_percent == whole.clipped_percent


def test_the_sums_of_a_small_tensor_by_hand() -> None:
    x, y = torch.tensor([3.0, -4.0, 0.0, 1.0]), torch.tensor([3.0, -3.5, 0.0, 1.25])
    result = ErrorSums.of(x, y, torch.tensor([False, True, False, False]))
    assert result == ErrorSums(count=4, clipped=1, signal=26.0, noise=0.3125, max_abs_error=0.5, amax=4.0)
    assert result.sqnr_db == pytest.approx(10 * math.log10(26.0 / 0.3125))
    assert result.clipped_percent == 25.0


def test_a_tenth_of_the_amplitude_is_20_db() -> None:
    x = torch.linspace(-1, 1, 50).double()
    assert ErrorSums.of(x, x * 1.1, torch.zeros(50, dtype=torch.bool)).sqnr_db == pytest.approx(20.0)


def test_the_ends_of_sqnr() -> None:
    none = torch.zeros(3, dtype=torch.bool)
    one, zero = torch.ones(3), torch.zeros(3)
    assert ErrorSums.of(one, one, none).sqnr_db == math.inf
    assert ErrorSums.of(zero, one, none).sqnr_db == -math.inf
    assert ErrorSums.of(one, zero, none).sqnr_db == 0.0
    assert ErrorSums().sqnr_db == math.inf
    assert ErrorSums().clipped_percent == 0.0


def test_no_values_add_nothing() -> None:
    some = sums(torch.tensor([0.3, 5.0]))
    assert some.clipped == 1
    assert some + ErrorSums() == some
    assert sums(torch.zeros(0)) == ErrorSums()


def test_half_precision_is_measured_in_float64() -> None:
    # The squares of 300 overflow float16 (largest 65504), their sum too.
    x = torch.full((8,), 300.0, dtype=torch.float16)
    result = ErrorSums.of(x, x + 1, torch.zeros(8, dtype=torch.bool))
    assert (result.signal, result.noise) == (720000.0, 8.0)
