"""Strategies: which values share one scale, and the shapes that follow.

Dims: B batch, S sequence, H heads, D head_dim, C = H·D, g group_size. Every static strategy is a reduction of one
finest statistic ``[H, D]`` (one entry per head and channel), so a single calibration answers all of them:

    scale = reduce_stat(finest)              the shape of the table below
    x ∘ expand_qparam(scale)                 broadcasts against the tensor

==================  ==========================  ===============================
strategy            projection ``[B, S, C]``    states ``[B, H, S, D]``
==================  ==========================  ===============================
tensor              ``[1]``                     ``[1]``
channel             ``[C]``                     ``[D]``
attn_head           ``[H]``                     ``[H, 1, 1]``
attn_head_channel   ``[C]``                     ``[H, 1, D]``
group               ``[C/g]``                   ``[H, 1, D/g]``
token (dynamic)     ``[B, S, 1]``               ``[B, H, S, 1]``
==================  ==========================  ===============================
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from graphquant.errors import StrategyError

STRATEGIES = ("tensor", "channel", "attn_head", "attn_head_channel", "group", "token")
UNBUILT_STRATEGIES = ("block", "tensor_group")
LayoutKind = Literal["projection", "states", "states_bshd", "features"]
Reduction = Literal["amin", "amax", "sum"]


@dataclass(frozen=True)
class TensorLayout:
    """Where heads and channels lie in a tensor.

    ``projection`` is ``[B, S, H·D]``, ``states`` is ``[B, H, S, D]``, ``states_bshd`` the same as ``[B, S, H, D]``,
    ``features`` is ``[B, S, D]`` without heads (the input of a projection; ``heads`` is 1 and ``head_dim`` its width).
    """

    kind: LayoutKind
    heads: int
    head_dim: int

    @property
    def channels(self) -> int:
        """C: how many entries the finest statistic has."""
        return self.heads * self.head_dim

    @property
    def is_states(self) -> bool:
        """Whether heads have a dim of their own, and scales the shapes of states."""
        return self.kind in ("states", "states_bshd")

    def same_statistics(self, other: "TensorLayout") -> bool:
        """Whether both hold the same heads and channels, if perhaps in dims of another order."""
        mine, theirs = ("states" if layout.is_states else layout.kind for layout in (self, other))
        return (mine, self.heads, self.head_dim) == (theirs, other.heads, other.head_dim)

    @property
    def axes(self) -> tuple[int, int | None]:
        """The dims of the sequence and, where they have one, of the heads."""
        return {"states": (2, 1), "states_bshd": (1, 2)}.get(self.kind, (1, None))

    @property
    def dims(self) -> str:
        """The tensor's shape in words, for tables and errors."""
        if self.is_states:
            sequence_and_heads = ("S", str(self.heads))
            first, second = sequence_and_heads if self.kind == "states_bshd" else sequence_and_heads[::-1]
            return f"[B, {first}, {second}, {self.head_dim}]"
        return f"[B, S, {self.channels}]"

    def rows(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """View ``x`` as rows ``[..., H, D]``, or, with a bool mask ``[B, S]``, the kept rows ``[N, H, D]``."""
        if self.is_states:
            rows = x.transpose(1, 2) if self.kind == "states" else x
        else:
            rows = x.reshape(*x.shape[:-1], self.heads, self.head_dim)
        return rows if mask is None else rows[mask]


def check_strategy(layout: TensorLayout, strategy: str, group_size: int | None, where: str) -> None:
    """Refuse a strategy that the tensor at ``where`` cannot take.

    Raises:
        StrategyError: unknown or unbuilt strategy, no heads to split by, or a group size that does not divide.
    """
    if strategy in UNBUILT_STRATEGIES:
        raise StrategyError(f"{where}: strategy {strategy!r} is not built yet; use one of {', '.join(STRATEGIES)}")
    if strategy not in STRATEGIES:
        raise StrategyError(f"{where}: unknown strategy {strategy!r}; there are {', '.join(STRATEGIES)}")
    if strategy.startswith("attn_head") and layout.kind == "features":
        raise StrategyError(
            f"{where}: strategy {strategy!r} needs attention heads, and the input of a projection {layout.dims} has "
            "none; use tensor, channel, group or token"
        )
    if strategy != "group":
        return
    width = layout.head_dim if layout.is_states else layout.channels
    if group_size is None or group_size < 1 or width % group_size:
        raise StrategyError(
            f"{where}: group_size must divide the last dim {width} of {layout.dims}, and {group_size} does not; "
            f"use one of {', '.join(str(g) for g in range(2, width + 1) if width % g == 0)}"
        )


def scale_shape(layout: TensorLayout, strategy: str, group_size: int | None = None) -> tuple[int, ...]:
    """Shape of the scale (and zero point) of a static strategy; see the module's table."""
    heads, dim, channels = layout.heads, layout.head_dim, layout.channels
    states = layout.is_states
    if strategy == "tensor":
        return (1,)
    if strategy == "channel":
        return (dim,) if states else (channels,)
    if strategy == "attn_head":
        return (heads, 1, 1) if states else (heads,)
    if strategy == "attn_head_channel":
        return (heads, 1, dim) if states else (channels,)
    if strategy == "group" and group_size:
        return (heads, 1, dim // group_size) if states else (channels // group_size,)
    raise StrategyError(f"strategy {strategy!r} has no static scale shape")


def reduce_stat(finest: Tensor, layout: TensorLayout, strategy: str, group_size: int | None, how: Reduction) -> Tensor:
    """Reduce a statistic ``[H, D]`` or ``[H, D, K]`` to the scale's shape (plus ``[K]``), by amin, amax or sum."""
    tail = finest.shape[2:]
    shape = scale_shape(layout, strategy, group_size)
    dims: tuple[int, ...]
    if strategy == "tensor":
        grouped, dims = finest, (0, 1)
    elif strategy == "attn_head":
        grouped, dims = finest, (1,)
    elif strategy == "group":
        grouped, dims = finest.reshape(-1, group_size or 1, *tail), (1,)
    elif strategy == "channel" and layout.is_states:
        grouped, dims = finest, (0,)
    else:
        return finest.reshape(*shape, *tail)
    reduced: Tensor = getattr(torch, how)(grouped, dims)
    return reduced.reshape(*shape, *tail)


def expand_qparam(param: Tensor, layout: TensorLayout, strategy: str, group_size: int | None) -> Tensor:
    """Expand a static scale or zero point so that it broadcasts against the tensor itself."""
    if strategy == "group":
        param = param.repeat_interleave(group_size or 1, dim=-1)
    if layout.kind == "states_bshd" and param.dim() == 3:
        return param.squeeze(1)
    if strategy == "attn_head" and layout.kind == "projection":
        return param.repeat_interleave(layout.head_dim)
    return param
