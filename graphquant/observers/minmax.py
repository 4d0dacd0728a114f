"""Running minimum and maximum: the default, exact under any order, split or merge of the batches."""

from dataclasses import dataclass

from torch import Tensor

from graphquant.numerics import QuantDtype
from graphquant.observers.base import Grain, Observer, State


@dataclass(frozen=True)
class MinMaxObserver(Observer):
    """Smallest and largest value ever seen, per head and channel."""

    name = "minmax"

    def range(self, state: State, grain: Grain, dtype: QuantDtype, symmetric: bool) -> tuple[Tensor, Tensor]:
        """Reduce the finest min and max to the grain."""
        return grain.amin(state["min"]), grain.amax(state["max"])
