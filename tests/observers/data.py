"""Observers, grains and rows that the observer tests share."""

import torch
from torch import Tensor

from graphquant.numerics import TensorLayout
from graphquant.observers import Observer, make_observer
from graphquant.observers.base import Grain, State
from tests.numerics.sites import STATIC_SITES, Site

OBSERVERS = {
    "minmax": make_observer("minmax"),
    "moving_average": make_observer("moving_average", {"averaging_constant": 0.25}),
    "percentile": make_observer("percentile", {"percentile": 90.0}),
    "mse": make_observer("mse", {"grid": 10}),
}
ORDERLESS = ["minmax", "percentile", "mse"]
"""Observers whose state holds no order: any split of the same rows gives the same state."""

GRAINS = [Grain(site.layout, site.strategy, site.group_size) for site in STATIC_SITES]
GRAIN = Grain(TensorLayout("projection", 4, 4), "tensor")
"""For laws that do not depend on the layout."""


def grain_id(grain: Grain) -> str:
    return str(Site(grain.layout, grain.strategy, grain.group_size))


def rows_of(grain: Grain, count: int, seed: int = 0, heavy: bool = True) -> Tensor:
    """Random rows ``[count, H, D]`` whose heads and channels differ in size and sign."""
    heads, dim = grain.layout.heads, grain.layout.head_dim
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, heads, dim, generator=generator)
    size = torch.linspace(0.5, 4.0, heads * dim).view(heads, dim)
    return (x**3 if heavy else x) * size + torch.linspace(-1.0, 2.0, dim)


def observed(observer: Observer, grain: Grain, *batches: Tensor) -> dict[str, Tensor]:
    """The state after the batches, in order."""
    state = observer.init(grain)
    for rows in batches:
        state = observer.update(state, rows, grain)
    return state


def assert_same_state(left: State, right: State, exact: bool = True) -> None:
    """Equal key by key and bit by bit; moving averages only to float32 rounding."""
    assert left.keys() == right.keys()
    for key, value in left.items():
        assert value.dtype == right[key].dtype, key
        if exact or not value.is_floating_point():
            assert torch.equal(value, right[key]), key
        else:
            torch.testing.assert_close(value, right[key], rtol=1e-5, atol=1e-6)
