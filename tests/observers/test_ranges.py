"""From a state to a range: one calibration answers every static strategy."""

from dataclasses import replace

import pytest
import torch

from graphquant.numerics import QuantDtype, TensorLayout, fake_quantize, qparams_from_range
from graphquant.observers import make_observer
from graphquant.observers.base import Grain
from tests.numerics.sites import E4M3, INT4, INT8, STATIC_SITES, Site
from tests.observers.data import GRAIN, OBSERVERS, ORDERLESS, grain_id, observed, rows_of

ONE = Grain(TensorLayout("projection", 1, 1), "tensor")
SCHEMES = pytest.mark.parametrize(
    ("dtype", "symmetric"), [(INT8, True), (INT4, False), (E4M3, True)], ids=["int8-sym", "int4-asym", "fp8-sym"]
)


@pytest.mark.parametrize("name", ORDERLESS)
@pytest.mark.parametrize("site", STATIC_SITES, ids=str)
@pytest.mark.parametrize(("dtype", "symmetric"), [(INT8, True), (INT4, False)], ids=["int8-sym", "int4-asym"])
def test_one_state_gives_every_scale_the_range_of_the_values_it_owns(
    name: str, site: Site, dtype: QuantDtype, symmetric: bool
) -> None:
    # Each scale's values are calibrated alone, as a tensor without heads or channels: the ranges must be equal.
    observer, layout = OBSERVERS[name], site.layout
    grain, finest = Grain(layout, site.strategy, site.group_size), Grain(layout, "tensor")
    rows = rows_of(finest, 40)
    low, high = observer.range(observed(observer, finest, rows), grain, dtype, symmetric)
    assert low.shape == high.shape == grain.shape
    members: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for head in range(layout.heads):
        for channel in range(layout.head_dim):
            members.setdefault(site.owner(head, channel), []).append(rows[:, head, channel])
    for owner, values in members.items():
        alone = observed(observer, ONE, torch.cat(values).view(-1, 1, 1))
        expected = observer.range(alone, ONE, dtype, symmetric)
        assert (low[owner].item(), high[owner].item()) == (expected[0].item(), expected[1].item()), owner


@pytest.mark.parametrize("name", ORDERLESS)
@pytest.mark.parametrize("site", STATIC_SITES, ids=str)
def test_calibrating_at_a_strategy_equals_calibrating_at_another(name: str, site: Site) -> None:
    observer, grain = OBSERVERS[name], Grain(site.layout, site.strategy, site.group_size)
    rows = rows_of(grain, 30)
    here, there = (observed(observer, at, rows) for at in (grain, replace(grain, strategy="tensor")))
    answers = [observer.range(state, grain, INT8, symmetric=False) for state in (here, there)]
    assert torch.equal(answers[0][0], answers[1][0])
    assert torch.equal(answers[0][1], answers[1][1])


@pytest.mark.parametrize("name", OBSERVERS)
@SCHEMES
def test_a_range_lies_within_what_was_seen_and_gives_usable_scales(
    name: str, dtype: QuantDtype, symmetric: bool
) -> None:
    for site in STATIC_SITES:
        grain = Grain(site.layout, site.strategy, site.group_size)
        state = observed(OBSERVERS[name], grain, rows_of(grain, 20, 1), rows_of(grain, 20, 2))
        low, high = OBSERVERS[name].range(state, grain, dtype, symmetric)
        assert (low >= grain.amin(state["min"])).all()
        assert (high <= grain.amax(state["max"])).all()
        assert (low <= high).all()
        scale, _ = qparams_from_range(low, high, dtype, symmetric)
        assert scale.shape == grain.shape
        assert (torch.isfinite(scale) & (scale > 0)).all()


@pytest.mark.parametrize("name", OBSERVERS)
def test_a_dead_head_gets_an_empty_range_beside_a_live_one(name: str) -> None:
    grain = Grain(TensorLayout("states", 4, 4), "attn_head")
    rows = rows_of(grain, 30)
    rows[:, 2] = 0.0
    low, high = OBSERVERS[name].range(observed(OBSERVERS[name], grain, rows), grain, INT8, symmetric=True)
    assert (low[2].item(), high[2].item()) == (0.0, 0.0)
    assert (high[[0, 1, 3]] > 0).all()
    scale, zero_point = qparams_from_range(low, high, INT8, symmetric=True)
    assert (fake_quantize(rows.view(1, 30, 4, 4).transpose(1, 2), scale, zero_point, INT8)[:, 2] == 0).all()


def test_minmax_never_forgets_a_larger_batch() -> None:
    observer = make_observer("minmax")
    ten, one = torch.full((2, 4, 4), 10.0), torch.full((2, 4, 4), 1.0)
    low, high = observer.range(observed(observer, GRAIN, ten, one), GRAIN, INT8, symmetric=True)
    scale, _ = qparams_from_range(low, high, INT8, symmetric=True)
    assert scale.item() == pytest.approx(10 / 127.5)


def test_minmax_running_range_has_the_measured_values() -> None:
    observer, state, seen = make_observer("minmax"), None, []
    state = observer.init(ONE)
    for batch in ([0.0, 0.0], [-3.0, 1.0], [-1.0, 3.0]):
        state = observer.update(state, torch.tensor(batch).view(2, 1, 1), ONE)
        seen.append([end.item() for end in observer.range(state, ONE, INT8, symmetric=True)])
    assert seen == [[0.0, 0.0], [-3.0, 1.0], [-3.0, 3.0]]


@pytest.mark.parametrize(
    "grain", [Grain(TensorLayout("states", 2, 4), name) for name in ("tensor", "attn_head")], ids=grain_id
)
def test_minmax_of_states_0_to_23_has_the_measured_ranges(grain: Grain) -> None:
    observer, x = make_observer("minmax"), torch.arange(24.0).view(1, 2, 3, 4)
    low, high = observer.range(observed(observer, grain, grain.layout.rows(x)), grain, INT4, symmetric=True)
    expected = {"tensor": ([0.0], [23.0]), "attn_head": ([0.0, 12.0], [11.0, 23.0])}[grain.strategy]
    assert (low.flatten().tolist(), high.flatten().tolist()) == expected
