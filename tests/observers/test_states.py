"""The algebra of observer states: update and merge are the same history, told in batches or in shards."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphquant.observers.base import Grain
from tests.numerics.sites import INT8
from tests.observers.data import (
    GRAIN,
    GRAINS,
    OBSERVERS,
    ORDERLESS,
    assert_same_state,
    grain_id,
    observed,
    rows_of,
)

EVERY_OBSERVER = pytest.mark.parametrize("name", OBSERVERS)
EVERY_GRAIN = pytest.mark.parametrize("grain", GRAINS, ids=grain_id)


@EVERY_OBSERVER
@EVERY_GRAIN
def test_merging_two_shards_equals_seeing_their_batches_in_order(name: str, grain: Grain) -> None:
    observer, batches = OBSERVERS[name], [rows_of(grain, count, seed) for seed, count in enumerate((3, 1, 5, 2))]
    whole = observed(observer, grain, *batches)
    for cut in range(5):
        merged = observer.merge(observed(observer, grain, *batches[:cut]), observed(observer, grain, *batches[cut:]))
        assert_same_state(merged, whole, exact=name in ORDERLESS)


@EVERY_OBSERVER
def test_merge_is_associative_and_the_empty_state_is_its_identity(name: str) -> None:
    observer, exact = OBSERVERS[name], name in ORDERLESS
    a, b, c = (observed(observer, GRAIN, rows_of(GRAIN, 4, seed), rows_of(GRAIN, 2, seed + 9)) for seed in range(3))
    left, right = observer.merge(observer.merge(a, b), c), observer.merge(a, observer.merge(b, c))
    assert_same_state(left, right, exact)
    assert_same_state(observer.merge(observer.init(GRAIN), a), a)
    assert_same_state(observer.merge(a, observer.init(GRAIN)), a)


@pytest.mark.parametrize("name", ORDERLESS)
@given(order=st.permutations(range(12)), cuts=st.lists(st.integers(0, 12), max_size=4))
@settings(deadline=None, max_examples=20)
def test_order_and_split_of_the_batches_do_not_matter(name: str, order: list[int], cuts: list[int]) -> None:
    rows, ends = rows_of(GRAIN, 12), [0, *sorted(cuts), 12]
    shuffled = rows[order]
    batches = [shuffled[start:stop] for start, stop in pairwise(ends)]
    assert_same_state(observed(OBSERVERS[name], GRAIN, *batches), observed(OBSERVERS[name], GRAIN, rows))


@pytest.mark.parametrize("name", ORDERLESS)
def test_shards_may_be_merged_in_any_order(name: str) -> None:
    observer = OBSERVERS[name]
    a, b = (observed(observer, GRAIN, rows_of(GRAIN, 4, seed)) for seed in (1, 2))
    assert_same_state(observer.merge(a, b), observer.merge(b, a))


@EVERY_OBSERVER
def test_an_empty_batch_changes_nothing(name: str) -> None:
    observer, empty = OBSERVERS[name], rows_of(GRAIN, 0)
    assert_same_state(observed(observer, GRAIN, empty), observer.init(GRAIN))
    rows = rows_of(GRAIN, 5)
    assert_same_state(observed(observer, GRAIN, empty, rows, empty), observed(observer, GRAIN, rows))


@EVERY_OBSERVER
def test_every_state_counts_its_rows_and_has_the_finest_min_and_max(name: str) -> None:
    a, b = rows_of(GRAIN, 3, 1), rows_of(GRAIN, 4, 2)
    state, both = observed(OBSERVERS[name], GRAIN, a, b), torch.cat([a, b])
    assert state["tokens"].item() == 7
    assert torch.equal(state["min"], both.amin(0))
    assert torch.equal(state["max"], both.amax(0))
    fresh = OBSERVERS[name].init(GRAIN)
    assert fresh["tokens"].item() == 0
    assert (fresh["min"] == torch.inf).all()
    assert (fresh["max"] == -torch.inf).all()


@EVERY_OBSERVER
@EVERY_GRAIN
def test_padding_never_counts(name: str, grain: Grain) -> None:
    observer, layout = OBSERVERS[name], grain.layout
    heads, dim = layout.heads, layout.head_dim
    shape = {"states": (2, heads, 5, dim), "states_bshd": (2, 5, heads, dim)}.get(layout.kind, (2, 5, heads * dim))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    mask = torch.tensor([[False, False, True, True, True], [True, True, True, True, False]])
    clean = observed(observer, grain, layout.rows(x, mask))
    assert clean["tokens"].item() == 7
    for padding in (100.0, torch.nan, torch.inf):
        padded = x.clone()
        layout.rows(padded)[~mask] *= padding
        assert not torch.equal(padded, x)
        assert_same_state(observed(observer, grain, layout.rows(padded, mask)), clean)
    assert_same_state(observed(observer, grain, layout.rows(x, mask & False)), observer.init(grain))


@EVERY_OBSERVER
def test_rows_may_have_batch_and_token_dims(name: str) -> None:
    rows = rows_of(GRAIN, 6)
    flat = observed(OBSERVERS[name], GRAIN, rows)
    assert_same_state(observed(OBSERVERS[name], GRAIN, rows.view(2, 3, 4, 4)), flat)
    assert_same_state(observed(OBSERVERS[name], GRAIN, rows.view(3, 2, 4, 4).transpose(0, 1)), flat)


@EVERY_OBSERVER
@pytest.mark.parametrize("real", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rows_have_float32_statistics(name: str, real: torch.dtype) -> None:
    observer, rows = OBSERVERS[name], rows_of(GRAIN, 50).to(real)
    state = observed(observer, GRAIN, rows)
    assert_same_state(state, observed(observer, GRAIN, rows.float()))
    assert {value.dtype for value in state.values() if value.is_floating_point()} == {torch.float32}
    assert all(end.dtype == torch.float32 for end in observer.range(state, GRAIN, INT8, symmetric=True))


@EVERY_OBSERVER
def test_update_and_merge_change_neither_states_nor_rows_and_keep_no_graph(name: str) -> None:
    observer, rows = OBSERVERS[name], rows_of(GRAIN, 5).requires_grad_()
    state, other = observed(observer, GRAIN, rows_of(GRAIN, 3, 1)), observed(observer, GRAIN, rows_of(GRAIN, 3, 2))
    before = [{key: value.clone() for key, value in each.items()} for each in (state, other)]
    copy = rows.detach().clone()
    after = observer.update(state, rows, GRAIN)
    observer.merge(after, other)
    observer.range(after, GRAIN, INT8, symmetric=True)
    assert_same_state(state, before[0])
    assert_same_state(other, before[1])
    assert torch.equal(rows.detach(), copy)
    assert not any(value.requires_grad for value in after.values())
