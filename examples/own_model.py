"""Models of your own, without transformers: attention in four spellings is found, quantized and exported alike.

python examples/own_model.py
"""

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import graphquant as gq

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 16


class Attention(nn.Module):
    """Grouped-query attention with sdpa; the others differ in how they attend, and not in their linears."""

    def __init__(self, kv_heads: int = KV_HEADS) -> None:
        super().__init__()
        self.to_q = nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.to_k = nn.Linear(HIDDEN, kv_heads * HEAD_DIM)
        self.to_v = nn.Linear(HIDDEN, kv_heads * HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of ``[B, S, H, D]`` tensors, the same."""
        q, k, v = (states.transpose(1, 2) for states in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over ``x [B, S, hidden]``."""
        q, k, v = (linear(x).unflatten(-1, (-1, HEAD_DIM)) for linear in (self.to_q, self.to_k, self.to_v))
        return self.out(self.attend(q, k, v).flatten(2))


class EinsumAttention(Attention):
    """Spelled out with einsum, which leaves the states in the order ``[B, S, H, D]``."""

    def __init__(self) -> None:
        super().__init__(kv_heads=HEADS)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of ``[B, S, H, D]`` tensors, the same."""
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * HEAD_DIM**-0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)


class FlexAttention(Attention):
    """With flex_attention, whose score function becomes a subgraph of its own."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of ``[B, S, H, D]`` tensors, the same."""

        def causal(score: Tensor, _batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return torch.where(query >= key, score, -float("inf"))

        q, k, v = (states.transpose(1, 2) for states in (q, k, v))
        return flex_attention(q, k, v, score_mod=causal, enable_gqa=True).transpose(1, 2)


class TorchAttention(nn.Module):
    """torch's own layer: its one in-projection splits heads after q, k and v, so only the states are sites."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over ``x [B, S, hidden]``; need_weights=False takes the path through sdpa."""
        output, _ = self.layer(x, x, x, need_weights=False)
        return output


MODELS: dict[str, type[nn.Module]] = {
    "sdpa": Attention,
    "einsum": EinsumAttention,
    "flex_attention": FlexAttention,
    "nn.MultiheadAttention": TorchAttention,
}


def quantize(model: nn.Module) -> tuple[gq.Report, float]:
    """Keys and values in int8, one scale a head: the report, and the largest change of the output."""
    torch.manual_seed(0)
    program = gq.capture(model, {"x": torch.randn(2, 12, HIDDEN)})  # batch and sequence become dynamic
    prepared = gq.prepare(program, gq.preset("int8-kv-attn-head"))
    gq.calibrate(prepared, [{"x": torch.randn(3, 33, HIDDEN)} for _ in range(4)], progress=False)
    quantized = gq.convert(prepared)
    x = torch.randn(1, 20, HIDDEN)
    with torch.no_grad():
        change = (quantized.module()(x=x) - program.module()(x=x)).abs().max()
    return gq.report(quantized), float(change)


def main() -> None:
    """Print what was quantized in each model."""
    rows = []
    for name, kind in MODELS.items():
        torch.manual_seed(0)
        report, change = quantize(kind().eval())
        rows += [(name, row.site, row.node, row.scale_shape, change) for row in report.rows]
    print(tabulate(rows, headers=("model", "site", "node", "scale", "largest change of the output")))


if __name__ == "__main__":
    main()
