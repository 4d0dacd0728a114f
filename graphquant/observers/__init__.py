"""Observers: statistics of the values at a site, and the range that each turns them into."""

from graphquant.observers.base import Observer, State
from graphquant.observers.histogram import MSEObserver, PercentileObserver
from graphquant.observers.minmax import MinMaxObserver
from graphquant.observers.moving_average import MovingAverageObserver
from graphquant.observers.registry import OBSERVERS, make_observer

__all__ = [
    "OBSERVERS",
    "MSEObserver",
    "MinMaxObserver",
    "MovingAverageObserver",
    "Observer",
    "PercentileObserver",
    "State",
    "make_observer",
]
