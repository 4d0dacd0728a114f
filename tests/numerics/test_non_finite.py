"""A NaN or an Inf is never turned into a number that looks right."""

import pytest
import torch

from graphquant.numerics import QuantDtype, dynamic_qparams, fake_quantize, qparams_from_range
from tests.numerics.sites import SCHEME_IDS, SCHEMES

EVERY_SCHEME = pytest.mark.parametrize(("dtype", "symmetric"), SCHEMES, ids=SCHEME_IDS)
BAD = pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])


@EVERY_SCHEME
@BAD
def test_a_range_that_is_not_finite_has_a_scale_that_is_not(dtype: QuantDtype, symmetric: bool, bad: float) -> None:
    low, high = torch.tensor([min(bad, -1.0), -1.0]), torch.tensor([max(bad, 1.0), 1.0])
    if bad != bad:
        low[0] = high[0] = bad
    scale, _ = qparams_from_range(low, high, dtype, symmetric)
    assert not torch.isfinite(scale[0])
    assert torch.isfinite(scale[1])


@EVERY_SCHEME
@BAD
def test_a_token_with_a_bad_value_is_bad_and_leaves_the_others_alone(
    dtype: QuantDtype, symmetric: bool, bad: float
) -> None:
    x = torch.tensor([[1.0, bad, -2.0], [1.0, 0.0, -2.0]])
    once = fake_quantize(x, *dynamic_qparams(x, dtype, symmetric), dtype)
    assert not torch.isfinite(once[0]).any()
    alone = fake_quantize(x[1:], *dynamic_qparams(x[1:], dtype, symmetric), dtype)
    assert torch.equal(once[1:], alone)
