"""Ways from the input to query, key and value states: fused linears, biases on their own, norms, rotary spellings."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tests.graph.modules import HEAD_DIM, HEADS, HIDDEN, Attention, tap

KV_HEADS = 2
WIDTHS = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]


def gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Projecting(Attention):
    """Attention with ``parts(x)``, the three projections ``[B, S, C]``, and ``embed``, what is done to q and k."""

    def __init__(self) -> None:
        super().__init__(gqa, kv_heads=KV_HEADS)

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        return (self.get_submodule(name)(x) for name in self.names[:3])

    def embed(self, states: Tensor) -> Tensor:
        return states

    def project(self, x: Tensor) -> Iterator[Tensor]:
        for letter, part in zip("qkv", self.parts(tap("input", x)), strict=True):
            output = tap(f"{letter}_proj.output", part)
            states = output.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            yield states if letter == "v" else self.embed(states)


class _Fused(Projecting):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, sum(WIDTHS))


class FusedSplit(_Fused):
    def parts(self, x: Tensor) -> Iterator[Tensor]:
        return iter(self.qkv(x).split(WIDTHS, dim=-1))


class FusedSlices(_Fused):
    def parts(self, x: Tensor) -> Iterator[Tensor]:
        fused = self.qkv(x)
        return iter((fused[..., :32], fused[..., 32:48], fused[:, :, 48:]))


class FusedKeyValueChunk(Projecting):
    def __init__(self) -> None:
        super().__init__()
        self.kv = nn.Linear(HIDDEN, 2 * WIDTHS[1])

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        return iter((self.q_proj(x), *self.kv(x).chunk(2, -1)))


class FusedConv1D(Projecting):
    """GPT-2's own fused projection: addmm of the flattened input."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn = Conv1D(sum(WIDTHS), HIDDEN)

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        return iter(self.c_attn(x).split(WIDTHS, dim=2))


class BareMatmul(Projecting):
    """``x @ W + b`` with parameters of its own, so that no node is a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(HIDDEN, width) for width in WIDTHS)
        self.biases = nn.ParameterList(torch.randn(width) for width in WIDTHS)

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        return (x @ weight + bias for weight, bias in zip(self.weights, self.biases, strict=True))


class NormOfProjection(Projecting):
    """OLMo-2: an RMSNorm over all channels, before the heads are split."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for width in WIDTHS[:2])

    def project(self, x: Tensor) -> Iterator[Tensor]:
        for index, (letter, part) in enumerate(zip("qkv", self.parts(tap("input", x)), strict=True)):
            output = tap(f"{letter}_proj.output", part)
            normed = output if letter == "v" else self.norms[index](output)
            yield normed.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


class NormOfStates(Projecting):
    """Gemma-3: an RMSNorm over head_dim, after the transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HEAD_DIM)

    def embed(self, states: Tensor) -> Tensor:
        return self.norm(states)


class ClampedProjection(Projecting):
    """MPT and DBRX: clip_qkv."""

    def embed(self, states: Tensor) -> Tensor:
        return states.clamp(-2.0, 2.0)


def angles(sequence: int) -> Tensor:
    return torch.outer(torch.arange(sequence), torch.tensor([1.0, 0.1, 0.01, 0.001]))


class InterleavedRotary(Projecting):
    """Cohere: pairs of neighbouring channels, in float32, put together by stack and flatten."""

    def embed(self, states: Tensor) -> Tensor:
        wide, turn = states.float(), angles(states.shape[2]).repeat_interleave(2, dim=-1)
        turned = torch.stack([-wide[..., 1::2], wide[..., ::2]], dim=-1).flatten(-2)
        return (wide * turn.cos() + turned * turn.sin()).to(states.dtype)


class PartialRotary(Projecting):
    """Phi and StableLM: rotary embedding on half of the channels."""

    def embed(self, states: Tensor) -> Tensor:
        turned, kept = states[..., :4], states[..., 4:]
        turn = angles(states.shape[2])
        half = torch.cat((-turned[..., 2:], turned[..., :2]), dim=-1)
        return torch.cat((turned * turn.cos() + half * turn.sin(), kept), dim=-1)


class PastFirst(Projecting):
    """The past of the cache is an input; the states are what is put behind it."""

    def forward(self, x: Tensor, past_key: Tensor, past_value: Tensor) -> Tensor:
        q, k, v = self.project(x)
        tap("query_states", q), tap("key_states", k), tap("value_states", v)
        keys, values = torch.cat([past_key, k], dim=2), torch.cat((past_value, v), dim=-2)
        attended = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class ContiguousStates(Projecting):
    """Copies between the transpose and the core are other names of one tensor."""

    def embed(self, states: Tensor) -> Tensor:
        return states.contiguous().clone()


PROJECTIONS = (
    Projecting,
    FusedSplit,
    FusedSlices,
    FusedKeyValueChunk,
    FusedConv1D,
    BareMatmul,
    NormOfProjection,
    NormOfStates,
    ClampedProjection,
    InterleavedRotary,
    PartialRotary,
    PastFirst,
    ContiguousStates,
)
