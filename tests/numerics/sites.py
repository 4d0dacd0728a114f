"""The formats and sites that the laws range over, and which scale owns which value, written out by hand."""

from dataclasses import dataclass

import torch
from torch import Tensor

from graphquant.numerics import (
    QuantDtype,
    TensorLayout,
    dynamic_qparams,
    expand_qparam,
    qparams_from_range,
    quant_dtype,
    reduce_stat,
)

INTEGERS = [quant_dtype("int", bits) for bits in range(2, 9)] + [quant_dtype("uint", 8), quant_dtype("uint", 4)]
FLOATS = [quant_dtype("float", 8, "e4m3"), quant_dtype("float", 8, "e5m2")]
SCHEMES = [(dtype, symmetric) for dtype in INTEGERS for symmetric in (True, False)] + [(fp8, True) for fp8 in FLOATS]
SCHEME_IDS = [f"{dtype.name}-{'sym' if symmetric else 'asym'}" for dtype, symmetric in SCHEMES]
INT8, INT4, UINT8 = quant_dtype("int", 8), quant_dtype("int", 4), quant_dtype("uint", 8)
E4M3, E5M2 = FLOATS


@dataclass(frozen=True)
class Site:
    """A tensor and the strategy that quantizes it."""

    layout: TensorLayout
    strategy: str
    group_size: int | None = None

    def __str__(self) -> str:
        heads, dim = self.layout.heads, self.layout.head_dim
        return f"{self.layout.kind}-{heads}x{dim}-{self.strategy}{self.group_size or ''}"

    def tensor_shape(self, batch: int, seq: int) -> tuple[int, ...]:
        heads, dim = self.layout.heads, self.layout.head_dim
        shapes = {"states": (batch, heads, seq, dim), "states_bshd": (batch, seq, heads, dim)}
        return shapes.get(self.layout.kind, (batch, seq, heads * dim))

    def owner(self, head: int, channel: int) -> tuple[int, ...]:
        """Index of the scale that value (head, channel) of a token uses: the design's table, value by value."""
        flat = head * self.layout.head_dim + channel
        states = self.layout.kind in ("states", "states_bshd")
        return {
            "tensor": (0,),
            "channel": (channel,) if states else (flat,),
            "attn_head": (head, 0, 0) if states else (head,),
            "attn_head_channel": (head, 0, channel) if states else (flat,),
            "group": (head, 0, channel // (self.group_size or 1)) if states else (flat // (self.group_size or 1),),
        }[self.strategy]

    def qparams(self, x: Tensor, dtype: QuantDtype, symmetric: bool) -> tuple[Tensor, Tensor]:
        """Scale and zero point of ``x``'s own range, expanded so that they broadcast against it."""
        if self.strategy == "token":
            return dynamic_qparams(x, dtype, symmetric)
        rows = self.layout.rows(x).flatten(0, 1)
        site = (self.layout, self.strategy, self.group_size)
        low, high = reduce_stat(rows.amin(0), *site, "amin"), reduce_stat(rows.amax(0), *site, "amax")
        scale, zero_point = qparams_from_range(low, high, dtype, symmetric)
        return expand_qparam(scale, *site), expand_qparam(zero_point, *site)


def static_sites(kind: str, heads: int, head_dim: int) -> list[Site]:
    """Every static strategy on one tensor; on a projection one group size also spans two heads."""
    layout = TensorLayout(kind, heads, head_dim)
    sites = [Site(layout, strategy) for strategy in ("tensor", "channel", "attn_head", "attn_head_channel")]
    sites.append(Site(layout, "group", head_dim // 2))
    if kind == "projection" and heads % 2 == 0:
        sites.append(Site(layout, "group", 2 * head_dim))
    return sites


# Query heads / KV heads of 4/4, 4/2 and 4/1 are sites of 4, 2 and 1 heads; head_dim is free of hidden / heads.
STATIC_SITES = [
    site
    for kind in ("projection", "states")
    for heads, head_dim in ((4, 4), (2, 8), (1, 6))
    for site in static_sites(kind, heads, head_dim)
] + static_sites("states_bshd", 2, 4)
SITES = STATIC_SITES + [Site(TensorLayout(kind, 2, 8), "token") for kind in ("projection", "states", "states_bshd")]
"""Small sites for laws over random tensors."""


def sample(site: Site, shape: str, exponent: int, seed: int, batch: int = 2, seq: int = 3) -> Tensor:
    """A random tensor at a site: ``shape`` names its distribution, 2^exponent its size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(site.tensor_shape(batch, seq), generator=generator)
    if shape == "heavy":
        x = x**5
    elif shape == "positive":
        x = x.abs() + 0.5
    elif shape == "negative":
        x = -x.abs() - 0.5
    elif shape == "dead_head":
        x = x.clone()
        site.layout.rows(x)[:, :, 0] = 0.0
    elif shape == "zero":
        x = torch.zeros_like(x)
    return x * 2.0**exponent


SHAPES = ("normal", "heavy", "positive", "negative", "dead_head", "zero")
