"""Attention modules with something about them that a Llama does not have; all of 4 heads of 4 channels.

Dims: B batch, S sequence, H heads, K key and value heads, D head_dim.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

from graphquant import capture

HIDDEN, HEADS, HEAD_DIM = 16, 4, 4


def x_of(batch: int = 2, sequence: int = 6, seed: int = 1) -> Tensor:
    return torch.randn(batch, sequence, HIDDEN, generator=torch.Generator().manual_seed(seed))


def export(module: nn.Module, **inputs: Any) -> ExportedProgram:
    """Capture a module by its keyword arguments, ``x`` where none are given."""
    names = getattr(module, "inputs", ("x",))
    given = inputs or {name: x_of(seed=seed) for seed, name in enumerate(names)}
    return capture(module.eval(), example_kwargs=given)


@functools.cache
def exported(cls: type[nn.Module], *args: Any) -> ExportedProgram:
    """``cls(*args)``, captured once for all tests."""
    return export(cls(*args))


class Base(nn.Module):
    """q, k and v linears, and the split into heads."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = nn.Linear(HIDDEN, kv_heads * HEAD_DIM)
        self.v_proj = nn.Linear(HIDDEN, kv_heads * HEAD_DIM)

    def heads(self, x: Tensor) -> Tensor:
        """``[B, S, H·D]`` to ``[B, H, S, D]``."""
        return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    def qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.heads(self.q_proj(x)), self.heads(self.k_proj(x)), self.heads(self.v_proj(x))

    def join(self, x: Tensor) -> Tensor:
        """``[B, H, S, D]`` to ``[B, S, H·D]``."""
        return x.transpose(1, 2).flatten(2)


class Plain(Base):
    """The whole model is one attention: the input of its projections is an input of the program."""

    def forward(self, x: Tensor) -> Tensor:
        return self.join(F.scaled_dot_product_attention(*self.qkv(x), is_causal=True))


class Wide(Plain):
    """Most of its weights are in a linear behind the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, 50_000)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(super().forward(x))
        return logits


class EnableGQA(Base):
    """Two KV heads that sdpa itself repeats."""

    def __init__(self) -> None:
        super().__init__(kv_heads=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(F.scaled_dot_product_attention(*self.qkv(x), is_causal=True, enable_gqa=True))


class Einsum(Base):
    """States that stay [B, S, H, D], as an einsum reads them."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (states.transpose(1, 2) for states in self.qkv(x))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return self.join(torch.einsum("bhqk,bkhd->bhqd", weights, v))


class Filled(Base):
    """Keys that are allocated first and filled in two parts, as latent attention joins them."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        keys = k.new_empty(k.shape)
        keys[..., :3] = k[..., :3]
        keys[..., 3:] = k[..., 3:] * 2.0
        return self.join(F.scaled_dot_product_attention(q, keys, v, is_causal=True))


class FilledLater(Base):
    """Keys of which one part is written after they were read."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        keys = k.new_zeros(k.shape)
        keys[..., :3], keys[..., 3:] = k[..., :3], k[..., 3:]
        first = F.scaled_dot_product_attention(q, keys, v, is_causal=True)
        keys[..., 0] = 0.0
        return self.join(first + F.scaled_dot_product_attention(q, keys, v, is_causal=True))


class ThreeInputs(Base):
    inputs = ("x", "y", "z")

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        q, k, v = self.heads(self.q_proj(x)), self.heads(self.k_proj(y)), self.heads(self.v_proj(z))
        return self.join(F.scaled_dot_product_attention(q, k, v))


class Parallel(Base):
    """The projections' input is also that of a feed-forward beside the attention, and of a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.feed_forward = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(x) + self.join(F.scaled_dot_product_attention(*self.qkv(x)))


class Masked(Base):
    """A padding mask ``[B, S]`` (1 for tokens), or any other mask that broadcasts to ``[B, S]`` in front."""

    inputs = ("x", "attention_mask")

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        keep = attention_mask.bool()[:, None]
        keep = keep[:, :, None] if attention_mask.dim() == 2 else keep
        return self.join(F.scaled_dot_product_attention(*self.qkv(x), attn_mask=keep))


class Present(Base):
    """Returns keys and values too, as a model with a cache outside does."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        q, k, v = self.qkv(x)
        return {"out": self.join(F.scaled_dot_product_attention(q, k, v)), "present": (k, v)}


class KeysAreValues(Base):
    """One linear gives keys and values: one tensor, two sites."""

    def forward(self, x: Tensor) -> Tensor:
        q, shared = self.heads(self.q_proj(x)), self.heads(self.k_proj(x))
        return self.join(F.scaled_dot_product_attention(q, shared, shared))


class Overwritten(Base):
    """Keys that an op overwrites in place behind the site: themselves, or the linear's output they are a view of."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        linear = self.k_proj(x)
        if self.how == "before the states":
            linear.mul_(2.0)
        k = self.heads(linear)
        if self.how == "the states":
            k.mul_(2.0)
        elif self.how == "what the states view":
            linear.mul_(2.0)
        elif self.how == "a part of the states":
            k[..., :2].mul_(2.0)
        return self.join(F.scaled_dot_product_attention(self.heads(self.q_proj(x)), k, self.heads(self.v_proj(x))))


class Cached(Base):
    """Keys and values are written into a cache of 8 positions at ``position [S]`` and read from there."""

    inputs = ("x", "position")

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, HEADS, 8, HEAD_DIM))
        self.register_buffer("values", torch.zeros(1, HEADS, 8, HEAD_DIM))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        seen = torch.arange(8) <= position[:, None]
        return self.join(F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=seen))
