"""A Llama small enough to capture in a second, and batches for it with padding on the left and of several shapes."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama in eval mode: 2 layers, 4 heads and 2 KV heads of 8 channels, 64 tokens; ``changes`` override."""
    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()


def tiny_batch(rows: int, length: int, padding: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """``rows`` sequences of ``length`` random tokens; the last one begins with ``padding`` tokens of padding."""
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[-1, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def tiny_batches() -> list[dict[str, Tensor]]:
    """Two batches of different B and S, the first with padding: 36 tokens that are none."""
    return [tiny_batch(3, 11, padding=4), tiny_batch(1, 7, seed=1)]


class TinyAttention(nn.Module):
    """One attention of 2 heads of 4 channels over ``x [B, S, 8]``, then a softmax that is a near miss of one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(8, 24)
        self.mix = nn.Buffer(torch.rand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return nn.functional.scaled_dot_product_attention(q, k, v).softmax(-1) @ self.mix
