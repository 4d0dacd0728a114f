"""Attention written in many ways as plain modules: one set of projections, and a function for each spelling.

Dims: B batch, S sequence, H query heads, K key and value heads, N = H/K copies of each, D head_dim, T ≥ S with a past.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

from graphquant.capture import capture

torch.set_num_threads(1)

HIDDEN, HEADS, HEAD_DIM = 16, 4, 8
Core = Callable[[Tensor, Tensor, Tensor], Tensor]
STATES = ("query_states", "key_states", "value_states")
_seen: dict[str, Tensor] = {}


def example(batch: int = 2, sequence: int = 6, width: int = HIDDEN) -> Tensor:
    return torch.randn(batch, sequence, width, generator=torch.Generator().manual_seed(1))


def tap(role: str, x: Tensor) -> Tensor:
    """Keep what a role's site ought to compute; leaves no trace in an exported graph."""
    if not torch.compiler.is_exporting():
        _seen[role] = x
    return x


def eager_values(module: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """Role → what the module's own code tapped, run in eager mode."""
    _seen.clear()
    with torch.no_grad():
        module.eval()(*inputs)
    return dict(_seen)


def causal(scores: Tensor) -> Tensor:
    """True where a query of ``[…, S, T]`` may not look."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)


def repeat_kv(x: Tensor, copies: int) -> Tensor:
    batch, heads, sequence, dim = x.shape
    return x[:, :, None].expand(batch, heads, copies, sequence, dim).reshape(batch, heads * copies, sequence, dim)


def export(module: nn.Module, *inputs: Tensor, dynamic: bool = True) -> ExportedProgram:
    """Capture a module; its input is ``example()`` unless others are given."""
    args = inputs or (example(),)
    return capture(module.eval(), example_args=args, dynamic_shapes=None if dynamic else (None,) * len(args))


def core_aten(program: ExportedProgram) -> ExportedProgram:
    with torch.no_grad():
        return program.run_decompositions()


class Attention(nn.Module):
    """q, k, v and output linears around a core ``(q, k, v) [B, H or K, S, D] -> [B, H, S, D]``; any names will do."""

    def __init__(
        self,
        core: Core,
        heads: int = HEADS,
        kv_heads: int = HEADS,
        head_dim: int = HEAD_DIM,
        bias: bool = False,
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    ) -> None:
        super().__init__()
        self.core, self.names, self.heads = core, names, (heads, kv_heads, kv_heads)
        for name, count in zip(names, self.heads, strict=False):
            self.add_module(name, nn.Linear(HIDDEN, count * head_dim, bias=bias))
        self.add_module(names[-1], nn.Linear(heads * head_dim, HIDDEN, bias=bias))

    def project(self, x: Tensor) -> Iterator[Tensor]:
        for letter, name, heads in zip("qkv", self.names, self.heads, strict=False):
            output = tap(f"{letter}_proj.output", self.get_submodule(name)(tap(f"{letter}_proj.input", x)))
            yield output.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (tap(role, states) for role, states in zip(STATES, self.project(x), strict=True))
        attended = self.core(q, k, v).transpose(1, 2)
        return self.get_submodule(self.names[-1])(attended.reshape(x.shape[0], x.shape[1], -1))


class Stack(nn.Module):
    """Layers one after another with a residual stream, as ``layers.0``, ``layers.1``, …"""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@dataclass(frozen=True)
class Spelling:
    """A core, and the heads around it."""

    core: Core
    heads: int
    kv_heads: int
    bias: bool

    def module(self) -> Attention:
        torch.manual_seed(0)
        return Attention(self.core, self.heads, self.kv_heads, bias=self.bias)


SPELLINGS: dict[str, Spelling] = {}


def spelling(heads: int = HEADS, kv_heads: int = HEADS, bias: bool = False) -> Callable[[Core], Core]:
    def register(core: Core) -> Core:
        SPELLINGS[core.__name__] = Spelling(core, heads, kv_heads, bias)
        return core

    return register


@spelling()
def sdpa_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@spelling(bias=True)
def sdpa_by_keyword(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(value=v, key=k, query=q, attn_mask=~causal(q @ k.mT), scale=0.25)


@spelling(kv_heads=2)
def sdpa_enable_gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


@spelling()
def plain_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.matmul(q, k.transpose(2, 3)) * HEAD_DIM**-0.5).softmax(-1) @ v


@spelling()
def masked_fill_and_dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / HEAD_DIM**0.5
    weights = F.softmax(scores.masked_fill(causal(scores), float("-inf")), dim=-1, dtype=torch.float32)
    return torch.matmul(F.dropout(weights.to(q.dtype), p=0.1, training=False), v)


@spelling()
def where_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.where(causal(scores), torch.finfo(q.dtype).min, scores).softmax(dim=3) @ v


@spelling()
def mask_before_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.swapaxes(-1, -2)
    bias = torch.zeros(scores.shape[-2:]).masked_fill(causal(scores), -1e9)
    return (bias[None, None] + scores).softmax(-1) @ v


@spelling(kv_heads=2)
def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, repeat_kv(k, 2).transpose(-1, -2)) * 0.3
    return (torch.tanh(scores / 50.0) * 50.0 + 0.0).softmax(-1) @ repeat_kv(v, 2)


@spelling(kv_heads=2)
def repeat_interleave(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.repeat_interleave(2, dim=1), torch.repeat_interleave(v, 2, dim=-3)
    return F.scaled_dot_product_attention(q, k, v)


@spelling(kv_heads=1)
def multi_query_expand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.expand(-1, HEADS, -1, -1).transpose(-2, -1)).softmax(-1) @ v.expand_as(q)


@spelling(kv_heads=1)
def multi_query_broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


@spelling(heads=1, kv_heads=1)
def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


@spelling(kv_heads=2)
def grouped_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.reshape(q.shape[0], 2, 2, q.shape[2], HEAD_DIM)
    weights = (grouped @ k.unsqueeze(2).transpose(-1, -2)).softmax(-1)
    return (weights @ v.unsqueeze(2)).reshape(q.shape)


@spelling()
def batched_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, heads, sequence, dim = q.shape
    q, k, v = (x.reshape(batch * heads, sequence, dim) for x in (q, k, v))
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).view(batch, heads, sequence, dim)


@spelling()
def biased_batched_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    split = q.shape[:2]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(torch.zeros(1, 1, 1), q, k.transpose(1, 2), beta=0.0, alpha=0.25)
    return (scores.softmax(-1) @ v).unflatten(0, split)


@spelling()
def query_scaled_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * 0.5) @ (k * 0.5).mT).softmax(-1) @ v


@spelling()
def scores_turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q.mT).mT.softmax(-1) @ v


@spelling()
def einsum_of_states(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@spelling(kv_heads=2)
def einsum_in_any_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("...kd, ...qd -> ...qk", repeat_kv(k, 2), q)
    return torch.einsum("bhkd,bhqk->bhqd", repeat_kv(v, 2), scores.softmax(-1))


@spelling(kv_heads=2)
def einsum_of_grouped_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grouped = q.reshape(q.shape[0], 2, 2, q.shape[2], HEAD_DIM)
    weights = torch.einsum("bgnqd,bgkd->bgnqk", grouped, k).softmax(-1)
    return torch.einsum("bgnqk,bgkd->bgnqd", weights, v).flatten(1, 2)


@spelling()
def one_copy_of_grouped_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q.unsqueeze(2) @ k.unsqueeze(2).mT).softmax(-1) @ v.unsqueeze(2)).squeeze(2)


@spelling(kv_heads=2)
def tiled_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.tile(1, 2, 1, 1))
