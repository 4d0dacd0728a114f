"""Observers by name: what there is, what each takes, and what is refused."""

import pytest

from graphquant.errors import ConfigError
from graphquant.observers import (
    OBSERVERS,
    MinMaxObserver,
    MovingAverageObserver,
    MSEObserver,
    PercentileObserver,
    make_observer,
)


def test_the_observers_by_their_names() -> None:
    assert list(OBSERVERS) == ["minmax", "moving_average", "percentile", "mse"]
    assert make_observer("minmax") == MinMaxObserver()
    assert make_observer("moving_average", {"averaging_constant": 0.5}) == MovingAverageObserver(0.5)
    assert make_observer("percentile", {"percentile": 99.0}) == PercentileObserver(99.0)
    assert make_observer("mse", {"grid": 10, "max_shrink": 0.5}) == MSEObserver(10, 0.5)
    assert make_observer("mse", {}) == make_observer("mse", None) == MSEObserver()
    assert all(observer.name == name for name, observer in OBSERVERS.items())


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("min_max", {}, "unknown observer 'min_max'; there are minmax, moving_average, percentile, mse"),
        ("minmax", {"percentile": 99.0}, "observer 'minmax' has no argument 'percentile'; it has none"),
        ("mse", {"bins": 5}, "observer 'mse' has no argument 'bins'; it has grid, max_shrink"),
        ("percentile", {"name": 5}, "observer 'percentile' has no argument 'name'; it has percentile"),
    ],
)
def test_an_unknown_name_or_argument_is_refused_with_what_there_is(
    name: str, kwargs: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_observer(name, kwargs)
    assert str(refusal.value) == message


INTERVALS = {
    ("percentile", "percentile"): (50.0, 100.0),
    ("moving_average", "averaging_constant"): (0.0, 1.0),
    ("mse", "grid"): (1, 10_000),
    ("mse", "max_shrink"): (0.0, 0.99),
}


@pytest.mark.parametrize(("name", "argument"), INTERVALS)
def test_a_value_out_of_its_interval_is_refused_with_the_interval(name: str, argument: str) -> None:
    low, high = INTERVALS[name, argument]
    for bad in (low, high + 0.01, -1.0, float("nan"), float("inf"), True, "0.7", None):
        with pytest.raises(ConfigError) as refusal:
            make_observer(name, {argument: bad})
        assert str(refusal.value) == (
            f"observer {name!r}: {argument} must be a number above {low} and at most {high}, not {bad!r}"
        )
    assert getattr(make_observer(name, {argument: high}), argument) == high
