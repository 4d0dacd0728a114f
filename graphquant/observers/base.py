"""What an observer is: pure functions over a dict of tensors (its state).

    state = observer.init(grain)
    state = observer.update(state, rows)            rows [..., H, D], padding already removed
    state = observer.merge(earlier, later)          equals having seen both, in that order
    low, high = observer.range(state, grain, …)     of the scale's shape

State tensors are float32 or int64, so that they are a module's buffers, a safetensors file, and a message between
processes without further ado. Every state holds ``min`` and ``max`` ``[H, D]`` and the number of rows, ``tokens``.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from graphquant.errors import ConfigError
from graphquant.numerics import QuantDtype, TensorLayout, reduce_stat, scale_shape

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Grain:
    """What shares a scale: the tensor's layout and the strategy (``token`` is observed as ``tensor``)."""

    layout: TensorLayout
    strategy: str
    group_size: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The scale's shape."""
        return scale_shape(self.layout, self.strategy, self.group_size)

    def amin(self, finest: Tensor) -> Tensor:
        """Smallest of a finest statistic ``[H, D]`` for every scale."""
        return reduce_stat(finest, self.layout, self.strategy, self.group_size, "amin")

    def amax(self, finest: Tensor) -> Tensor:
        """Largest of a finest statistic ``[H, D]`` for every scale."""
        return reduce_stat(finest, self.layout, self.strategy, self.group_size, "amax")

    def sum(self, finest: Tensor) -> Tensor:
        """Sum of a finest statistic ``[H, D]`` or ``[H, D, K]`` for every scale."""
        return reduce_stat(finest, self.layout, self.strategy, self.group_size, "sum")


class Observer(ABC):
    """Base of the observers; a subclass is a frozen dataclass whose fields are its ``observer_kwargs``."""

    name: ClassVar[str]
    kwargs_in_state: ClassVar[bool] = False
    """Whether a state depends on the observer's arguments, and so answers those alone."""

    def init(self, grain: Grain) -> dict[str, Tensor]:
        """The state of an observer that has seen nothing."""
        shape = (grain.layout.heads, grain.layout.head_dim)
        return {
            "min": torch.full(shape, torch.inf),
            "max": torch.full(shape, -torch.inf),
            "tokens": torch.zeros((), dtype=torch.int64),
        }

    def update(self, state: State, rows: Tensor, grain: Grain) -> dict[str, Tensor]:
        """The state after also having seen ``rows`` ``[..., H, D]``; a batch without rows changes nothing."""
        rows = rows.detach().flatten(0, -3)
        if rows.shape[0] == 0:
            return dict(state)
        low, high = rows.amin(0).float(), rows.amax(0).float()
        return {
            "min": torch.minimum(state["min"], low),
            "max": torch.maximum(state["max"], high),
            "tokens": state["tokens"] + rows.shape[0],
        } | self._update(state, rows, low, high, grain)

    def merge(self, earlier: State, later: State) -> dict[str, Tensor]:
        """The state of having seen all that ``earlier`` saw, then all that ``later`` saw."""
        return {
            "min": torch.minimum(earlier["min"], later["min"]),
            "max": torch.maximum(earlier["max"], later["max"]),
            "tokens": earlier["tokens"] + later["tokens"],
        } | self._merge(earlier, later)

    def _update(self, state: State, rows: Tensor, low: Tensor, high: Tensor, grain: Grain) -> dict[str, Tensor]:
        """What a subclass keeps beside min, max and tokens; ``low`` and ``high`` are this batch's, ``[H, D]``."""
        return {}

    def _merge(self, earlier: State, later: State) -> dict[str, Tensor]:
        return {}

    @abstractmethod
    def range(self, state: State, grain: Grain, dtype: QuantDtype, symmetric: bool) -> tuple[Tensor, Tensor]:
        """Lowest and highest value to represent, each of ``grain.shape``."""


def check_number(observer: str, name: str, value: object, low: float, high: float) -> None:
    """Refuse an observer argument that is no number in ``(low, high]``.

    Raises:
        ConfigError: naming the observer, the argument and the interval.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
        raise ConfigError(
            f"observer {observer!r}: {name} must be a number above {low} and at most {high}, not {value!r}"
        )
