"""Modules that share: a layer called twice, keys that are the values, keys of another layer, keys that are an input."""

from torch import Tensor, nn

from tests.graph.modules import HIDDEN, Attention, sdpa_causal


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.layer(x))


class OneTensor(Attention):
    """The keys are the values too."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, _ = self.project(x)
        return self.o_proj(self.core(q, k, k).transpose(1, 2).flatten(2))


class SharedKeyValue(nn.Module):
    """A second layer attends with its own queries to the keys and values of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(sdpa_causal), nn.Linear(HIDDEN, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first.project(x)
        x = x + self.first.o_proj(sdpa_causal(q, k, v).transpose(1, 2).flatten(2))
        q = self.second(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return sdpa_causal(q, k, v)


class CrossAttention(Attention):
    """Keys and values come from other inputs, as they are: [B, H, T, D]."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, *_ = self.project(x)
        return (q @ keys.mT).softmax(-1) @ values
