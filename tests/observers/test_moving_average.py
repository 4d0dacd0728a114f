"""The moving average: its numbers, its order, and the one strategy that it answers."""

import pytest
import torch
from torch import Tensor

from graphquant.errors import CalibrationError
from graphquant.numerics import TensorLayout
from graphquant.observers import make_observer
from graphquant.observers.base import Grain
from tests.numerics.sites import INT8
from tests.observers.data import GRAINS, assert_same_state, grain_id, observed, rows_of

ONE = Grain(TensorLayout("projection", 1, 1), "tensor")


def constant(value: float) -> Tensor:
    return torch.full((2, 1, 1), value)


def ends(c: float, grain: Grain, *batches: Tensor) -> tuple[Tensor, Tensor]:
    observer = make_observer("moving_average", {"averaging_constant": c})
    return observer.range(observed(observer, grain, *batches), grain, INT8, symmetric=True)


def test_31_batches_of_10_average_to_10() -> None:
    observer = make_observer("moving_average")
    state = observed(observer, ONE, *[constant(10.0)] * 31)
    low, high = observer.range(state, ONE, INT8, symmetric=True)
    assert low.item() == pytest.approx(10.0, rel=1e-6)
    assert high.item() == pytest.approx(10.0, rel=1e-6)


def test_the_running_average_has_the_measured_values() -> None:
    batches = [torch.tensor(batch).view(2, 1, 1) for batch in ([0.0, 0.0], [-3.0, 1.0], [-1.0, 3.0])]
    seen = [[end.item() for end in ends(0.1, ONE, *batches[:count])] for count in (1, 2, 3)]
    assert seen[0] == [0.0, 0.0]
    assert seen[1] == pytest.approx([-0.3, 0.1])
    assert seen[2] == pytest.approx([-0.37, 0.39])


@pytest.mark.parametrize("grain", GRAINS, ids=grain_id)
@pytest.mark.parametrize("c", [0.01, 0.3, 1.0])
def test_the_average_is_the_textbook_recurrence_of_each_scales_extremes(grain: Grain, c: float) -> None:
    batches = [rows_of(grain, 3, seed) for seed in range(6)]
    low, high = grain.amin(batches[0].amin(0)).double(), grain.amax(batches[0].amax(0)).double()
    for rows in batches[1:]:
        low = (1 - c) * low + c * grain.amin(rows.amin(0))
        high = (1 - c) * high + c * grain.amax(rows.amax(0))
    mine = ends(c, grain, *batches)
    torch.testing.assert_close(mine[0].double(), low, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine[1].double(), high, rtol=1e-5, atol=1e-6)
    assert mine[0].shape == grain.shape


def test_the_average_is_of_maxima_not_the_maximum_of_averages() -> None:
    # Two channels take turns at 10: every batch's maximum is 10, while each channel averages 5.
    grain = Grain(TensorLayout("projection", 1, 2), "tensor")
    first, second = torch.tensor([[[10.0, 0.0]]]), torch.tensor([[[0.0, 10.0]]])
    assert ends(0.5, grain, first, second)[1].item() == 10.0


def test_a_later_batch_counts_by_the_constant() -> None:
    assert ends(0.25, ONE, constant(8.0), constant(4.0))[1].item() == 7.0
    assert ends(0.25, ONE, constant(4.0), constant(8.0))[1].item() == 5.0
    assert ends(1.0, ONE, constant(4.0), constant(8.0))[1].item() == 8.0


def test_merging_keeps_the_order_of_the_shards() -> None:
    observer = make_observer("moving_average", {"averaging_constant": 0.25})
    a, b = (observed(observer, ONE, constant(value), constant(value)) for value in (8.0, 4.0))
    forward, backward = observer.merge(a, b), observer.merge(b, a)
    assert observer.range(forward, ONE, INT8, symmetric=True)[1].item() == 6.25  # 8 · 0.75² + 4 · (1 − 0.75²)
    assert observer.range(backward, ONE, INT8, symmetric=True)[1].item() == 5.75


@pytest.mark.parametrize("c", [0.25, 1.0])
def test_an_empty_shard_on_either_side_changes_nothing(c: float) -> None:
    observer = make_observer("moving_average", {"averaging_constant": c})
    state, empty = observed(observer, ONE, constant(8.0), constant(4.0)), observer.init(ONE)
    assert_same_state(observer.merge(state, empty), state)
    assert_same_state(observer.merge(empty, state), state)
    assert_same_state(observer.merge(empty, empty), empty)


def test_another_strategy_is_refused_by_name() -> None:
    layout = TensorLayout("states", 2, 4)
    observer = make_observer("moving_average")
    state = observed(observer, Grain(layout, "tensor"), torch.ones(3, 2, 4))
    with pytest.raises(CalibrationError) as refusal:
        observer.range(state, Grain(layout, "attn_head"), INT8, symmetric=True)
    assert str(refusal.value) == (
        "moving_average keeps one average per scale, here [1], and cannot answer strategy 'attn_head' with scales "
        "[2, 1, 1]: calibrate with it, or use minmax"
    )
