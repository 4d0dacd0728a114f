"""Observers by the name that a configuration uses."""

from collections.abc import Mapping
from dataclasses import fields

from graphquant.errors import ConfigError
from graphquant.observers.base import Observer
from graphquant.observers.histogram import MSEObserver, PercentileObserver
from graphquant.observers.minmax import MinMaxObserver
from graphquant.observers.moving_average import MovingAverageObserver

OBSERVERS: dict[str, type[Observer]] = {
    observer.name: observer for observer in (MinMaxObserver, MovingAverageObserver, PercentileObserver, MSEObserver)
}


def make_observer(name: str, kwargs: Mapping[str, float] | None = None) -> Observer:
    """The observer called ``name`` with its ``observer_kwargs``.

    Raises:
        ConfigError: there is no such observer, or it has no such argument, or the argument's value is out of range.
    """
    if name not in OBSERVERS:
        raise ConfigError(f"unknown observer {name!r}; there are {', '.join(OBSERVERS)}")
    known = [field.name for field in fields(OBSERVERS[name])]  # type: ignore[arg-type]
    for key in kwargs or {}:
        if key not in known:
            raise ConfigError(f"observer {name!r} has no argument {key!r}; it has {', '.join(known) or 'none'}")
    return OBSERVERS[name](**(kwargs or {}))
