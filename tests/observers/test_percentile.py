"""The percentile observer against ``torch.quantile``, to the width of a histogram bin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from graphquant.numerics import TensorLayout, quant_dtype
from graphquant.observers import make_observer
from graphquant.observers.base import Grain
from graphquant.observers.histogram import BINS, EDGES, HALF_BINS, bin_index
from tests.numerics.sites import INT8, STATIC_SITES
from tests.observers.data import observed, rows_of

ONE = Grain(TensorLayout("projection", 1, 1), "tensor")
WIDTH = 1.0625  # ratio of the ends of the widest bin: 17/16
PERCENTILES = pytest.mark.parametrize("percentile", [60.0, 90.0, 99.0, 99.9, 99.99])


def data(kind: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(20_000, generator=generator)
    return {"normal": x, "heavy": x**5, "shifted": x + 1.0, "skewed": x.exp() - 0.2, "small": x * 2.0**-12}[kind]


EVERY_DATA = pytest.mark.parametrize("kind", ["normal", "heavy", "shifted", "skewed", "small"])


def ends(x: Tensor, percentile: float, symmetric: bool) -> tuple[float, float]:
    observer = make_observer("percentile", {"percentile": percentile})
    low, high = observer.range(observed(observer, ONE, x.view(-1, 1, 1)), ONE, INT8, symmetric)
    return low.item(), high.item()


def assert_quantile(found: float, x: Tensor, share: float) -> None:
    """``found`` is at most a bin away from the order statistics on either side of the quantile."""
    below, above = (torch.quantile(x, share, interpolation=side).item() for side in ("lower", "higher"))
    assert below / WIDTH <= found <= above * WIDTH


@EVERY_DATA
@PERCENTILES
@pytest.mark.parametrize("seed", [0, 1])
def test_the_symmetric_range_is_the_quantile_of_magnitudes(kind: str, percentile: float, seed: int) -> None:
    x = data(kind, seed)
    low, high = ends(x, percentile, symmetric=True)
    assert_quantile(max(-low, high), x.abs(), percentile / 100)


@EVERY_DATA
@PERCENTILES
@pytest.mark.parametrize("seed", [0, 1])
def test_the_asymmetric_range_has_the_quantile_at_either_end(kind: str, percentile: float, seed: int) -> None:
    x = data(kind, seed)
    low, high = ends(x, percentile, symmetric=False)
    assert_quantile(high, x, percentile / 100)
    if torch.quantile(x, 1 - percentile / 100, interpolation="higher") < 0:
        assert_quantile(-low, -x, percentile / 100)
    else:
        assert low <= 0.0  # the range is widened to hold 0, so that a quantile above it says nothing more


@PERCENTILES
@pytest.mark.parametrize("sign", [1, -1])
def test_one_sided_data_has_its_quantile_on_its_own_side(percentile: float, sign: int) -> None:
    x = sign * (data("normal", 2).abs() + 0.01)
    low, high = ends(x, percentile, symmetric=False)
    near, far = (low, high) if sign > 0 else (-high, -low)
    assert 0 <= near <= x.abs().min().item() * WIDTH
    assert_quantile(far, x.abs(), percentile / 100)
    low, high = ends(x, percentile, symmetric=True)
    assert_quantile(max(-low, high), x.abs(), percentile / 100)


@pytest.mark.parametrize("kind", ["normal", "heavy"])
def test_outliers_are_left_out_and_a_higher_percentile_is_never_narrower(kind: str) -> None:
    x = data(kind, 3)
    x[0], x[1] = 1e4, -1e4
    for symmetric in (True, False):
        found = [ends(x, percentile, symmetric) for percentile in (51.0, 75.0, 90.0, 99.0, 99.9, 100.0)]
        assert found == sorted(found, key=lambda pair: pair[1] - pair[0])
        assert found[4][1] < 1e3
        assert found[5] == (-1e4, 1e4)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("site", STATIC_SITES, ids=str)
def test_100_percent_equals_minmax(site: object, symmetric: bool) -> None:
    grain = Grain(site.layout, site.strategy, site.group_size)
    for rows in (rows_of(grain, 30), rows_of(grain, 30).abs(), -rows_of(grain, 30).abs(), rows_of(grain, 1)):
        found = [
            observer.range(observed(observer, grain, rows), grain, INT8, symmetric)
            for observer in (make_observer("percentile", {"percentile": 100.0}), make_observer("minmax"))
        ]
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [1e-30, 1e-8, 2.0**-22, 1e5, 1e30])
@pytest.mark.parametrize(
    ("name", "kwargs"), [("percentile", {"percentile": 60.0}), ("mse", {})], ids=["percentile", "mse"]
)
def test_data_beyond_the_bins_keeps_its_exact_range(
    name: str, kwargs: dict[str, float], size: float, symmetric: bool
) -> None:
    # On data of ordinary size both would cut: at 60 percent, and at 3 bits.
    observer, bits3 = make_observer(name, kwargs), quant_dtype("int", 3)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).clamp(-3, 3).view(-1, 1, 1)
    low, high = observer.range(observed(observer, ONE, x * size), ONE, bits3, symmetric)
    assert (low, high) == ((x * size).min(), (x * size).max())
    low, high = observer.range(observed(observer, ONE, x), ONE, bits3, symmetric)
    assert max(-low, high) < 0.9 * x.abs().max()


def test_a_small_channel_beside_a_large_one_keeps_its_own_exact_range() -> None:
    grain = Grain(TensorLayout("projection", 1, 2), "channel")
    observer = make_observer("percentile", {"percentile": 90.0})
    x = torch.stack([data("normal", 4), data("normal", 5) * 1e-8], -1).unsqueeze(1)
    low, high = observer.range(observed(observer, grain, x), grain, INT8, symmetric=True)
    assert high[0] < x[..., 0].max() / 1.5
    assert (low[1].item(), high[1].item()) == (x[..., 1].min().item(), x[..., 1].max().item())


@given(value=st.floats(-65535.0, 65535.0, width=32))
@settings(deadline=None, max_examples=200)
def test_a_value_lies_in_its_bin(value: float) -> None:
    index = bin_index(torch.tensor([value])).item()
    assert (index >= HALF_BINS) == (value < 0)
    place = index % HALF_BINS
    assert EDGES[place] <= abs(value) < EDGES[place + 1]


def test_the_bins_reach_from_2_to_the_minus_24_to_2_to_the_16_and_none_is_wider_than_a_16th() -> None:
    assert EDGES[0] == 0
    assert (EDGES[1].item(), EDGES[-1].item()) == (2.0**-24, 2.0**16)
    assert len(EDGES) == HALF_BINS + 1
    ratio = EDGES[2:] / EDGES[1:-1]
    assert (ratio > 1).all()
    assert ratio.max().item() == WIDTH
    ends_of_the_range = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30])
    assert bin_index(ends_of_the_range).tolist() == [0, 0, 0, HALF_BINS, HALF_BINS - 1, BINS - 1]
