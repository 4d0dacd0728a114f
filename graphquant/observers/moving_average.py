r"""Exponential moving average of each batch's minimum and maximum.

    m₁ = x₁,   mₖ = (1 − c) · mₖ₋₁ + c · xₖ          x: the batch's min (max) of everything that shares a scale

The first batch enters whole (an average that starts at 0 has reached 3.4 after 31 batches of 10.0 at c = 0.01).
An average of maxima is not the maximum of averages, so the state belongs to one strategy. It is kept as the first
batch and the sum of the rest, which makes a merge exact:

    m = (1 − c)ⁿ⁻¹ · first + rest
    first, rest of A‖B:   first_A,   (1 − c)ⁿᴮ · rest_A + c · (1 − c)ⁿᴮ⁻¹ · first_B + rest_B
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from graphquant.errors import CalibrationError
from graphquant.numerics import QuantDtype
from graphquant.observers.base import Grain, Observer, State, check_number

_ENDS = ("low", "high")


@dataclass(frozen=True)
class MovingAverageObserver(Observer):
    """Moving average of batch extremes; ``averaging_constant`` c is the weight of a new batch."""

    averaging_constant: float = 0.01

    name = "moving_average"
    kwargs_in_state = True

    def __post_init__(self) -> None:
        check_number(self.name, "averaging_constant", self.averaging_constant, 0.0, 1.0)

    def init(self, grain: Grain) -> dict[str, Tensor]:
        """Min and max as ever, and per scale the first batch and the weighted sum of the rest."""
        state = super().init(grain)
        state["batches"] = torch.zeros((), dtype=torch.int64)
        for end in _ENDS:
            state[f"first_{end}"] = torch.zeros(grain.shape)
            state[f"rest_{end}"] = torch.zeros(grain.shape)
        return state

    def _update(self, state: State, rows: Tensor, low: Tensor, high: Tensor, grain: Grain) -> dict[str, Tensor]:
        batch = {"batches": torch.ones_like(state["batches"])}
        for end, value in (("low", grain.amin(low)), ("high", grain.amax(high))):
            batch[f"first_{end}"] = value
            batch[f"rest_{end}"] = torch.zeros_like(value)
        return self._merge(state, batch)

    def _merge(self, earlier: State, later: State) -> dict[str, Tensor]:
        keep = 1.0 - self.averaging_constant
        merged = {"batches": earlier["batches"] + later["batches"]}
        for end in _ENDS:
            first, rest = f"first_{end}", f"rest_{end}"
            if not earlier["batches"]:
                merged |= {first: later[first], rest: later[rest]}
            elif not later["batches"]:
                merged |= {first: earlier[first], rest: earlier[rest]}
            else:
                count = int(later["batches"])
                joined = self.averaging_constant * keep ** (count - 1) * later[first] + later[rest]
                merged |= {first: earlier[first], rest: keep**count * earlier[rest] + joined}
        return merged

    def range(self, state: State, grain: Grain, dtype: QuantDtype, symmetric: bool) -> tuple[Tensor, Tensor]:
        """The two averages.

        Raises:
            CalibrationError: the state was collected for another strategy.
        """
        if state["first_low"].shape != grain.shape:
            raise CalibrationError(
                f"moving_average keeps one average per scale, here {list(state['first_low'].shape)}, and cannot answer "
                f"strategy {grain.strategy!r} with scales {list(grain.shape)}: calibrate with it, or use minmax"
            )
        weight = (1.0 - self.averaging_constant) ** (int(state["batches"]) - 1)
        low, high = (weight * state[f"first_{end}"] + state[f"rest_{end}"] for end in _ENDS)
        return low, high
