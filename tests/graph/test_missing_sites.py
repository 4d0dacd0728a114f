"""Attention with a part that cannot be matched: its other sites are found, and a near miss says why not that part."""

import re

import pytest
import torch
from torch import Tensor, nn

from graphquant.graph import find_attention
from tests.graph.modules import HEAD_DIM, HIDDEN, Attention, Core, core_aten, export, sdpa_causal

QUERIES = {"q_proj.input", "q_proj.output", "query_states"}
STATES = {"query_states", "key_states", "value_states"}


def repeated_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa_causal(q, k.repeat_interleave(2, dim=2), v.repeat_interleave(2, dim=-2))


def expanded_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.unsqueeze(3).expand(-1, -1, -1, 2, -1).reshape(x.shape[0], x.shape[1], -1, HEAD_DIM) for x in (k, v))
    return sdpa_causal(q, k, v)


def tiled_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa_causal(q, k.repeat(1, 1, 2, 1), v.tile(1, 1, 2, 1))


class NoProjection(Attention):
    """One head, and states that keep the linear's shape [B, S, D]: no tensor has a dim of heads."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.q_proj(x) @ self.k_proj(x).mT).softmax(-1) @ self.v_proj(x)


class Square(nn.Module):
    """One tensor times itself."""

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.matmul(x, x)
        return torch.matmul(scores.softmax(-1), x)


@pytest.mark.parametrize(
    ("module", "inputs", "node"),
    [(NoProjection(sdpa_causal), (), "linear"), (Square(), (torch.randn(2, 3, 8, 8),), "x")],
    ids=["no heads", "one tensor"],
)
def test_a_core_without_states(module: nn.Module, inputs: tuple[Tensor, ...], node: str) -> None:
    sites = find_attention(export(module, *inputs))
    assert sites.layers == ()
    assert [miss.what for miss in sites.near_misses] == ["query_states", "key_states", "value_states"]
    ends = "computes new values" if node == "linear" else "is an input or a weight"
    assert re.match(rf"{node} .*{ends}; expected to reach query states \[B, H, S, D\]", sites.near_misses[0].reason)


@pytest.mark.parametrize(
    ("core", "decomposed"),
    [(repeated_positions, False), (expanded_positions, False), (tiled_positions, False), (expanded_positions, True)],
)
def test_copies_of_positions_are_no_repeat_kv(core: Core, decomposed: bool) -> None:
    """The queries are there, the keys and values are not: their S is not the program's."""
    exported = export(Attention(core), dynamic=not decomposed)
    sites = find_attention(core_aten(exported) if decomposed else exported)
    assert {site.role for site in sites} == QUERIES
    assert [miss.what for miss in sites.near_misses] == ["key_states", "value_states"]
    for miss in sites.near_misses:
        assert re.search(r"copies along S; expected copies of KV heads only; expected to reach", miss.reason)


class FromTable(Attention):
    """Keys looked up in a table, with no linear."""

    def __init__(self) -> None:
        super().__init__(sdpa_causal)
        self.table = nn.Embedding(6, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, _, v = self.project(x)
        k = self.table(x[..., 0].long().clamp(0, 5)).unflatten(-1, (4, HEAD_DIM)).transpose(1, 2)
        return sdpa_causal(q, k, v)


class TwoLinears(Attention):
    """Keys that are the sum of two linears, as with an adapter."""

    def __init__(self) -> None:
        super().__init__(sdpa_causal)
        self.adapter = nn.Linear(HIDDEN, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, _, v = self.project(x)
        k = (self.k_proj(x) + self.adapter(x)).unflatten(-1, (4, HEAD_DIM)).transpose(1, 2)
        return sdpa_causal(q, k, v)


class TwoSources(TwoLinears):
    """Keys of two sequences joined: what comes first is computed here, and no past of a cache."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        other = self.adapter(x).unflatten(-1, (4, HEAD_DIM)).transpose(1, 2)
        return sdpa_causal(q, torch.cat([other, k], dim=2), torch.cat([v, v], dim=2))


class Interleaved(nn.Module):
    """GPT-NeoX: each head's q, k and v lie beside one another in the fused projection."""

    def __init__(self, by_head: bool) -> None:
        super().__init__()
        self.by_head, self.query_key_value = by_head, nn.Linear(HIDDEN, 96)

    def forward(self, x: Tensor) -> Tensor:
        fused = self.query_key_value(x)
        if self.by_head:
            return sdpa_causal(*fused.view(*x.shape[:2], 4, 3 * HEAD_DIM).transpose(1, 2).chunk(3, dim=-1))
        return sdpa_causal(*fused.view(*x.shape[:2], 3, 4, HEAD_DIM).permute(2, 0, 3, 1, 4).unbind(0))


class ChannelsFirst(Attention):
    """Channel c belongs to head c mod H, so that no group of D neighbours is a head."""

    def forward(self, x: Tensor) -> Tensor:
        q, _, v = self.project(x)
        return sdpa_causal(q, self.k_proj(x).unflatten(-1, (HEAD_DIM, 4)).permute(0, 3, 1, 2), v)


_SCATTERED = r"the 32 channels of linear_\d are not split into \[4, 8\]"
_FUSED = r"linear \[.*, 96\] has 96 channels; expected 4 heads · 8 = 32, or a slice of that width"


@pytest.mark.parametrize(
    ("module", "missing", "reason"),
    [
        (FromTable(), "k", r"no linear feeds transpose_\d; expected one linear on every path to it"),
        (TwoLinears(), "k", r"transpose_\d is fed by 2 linears \(linear_\d, linear_\d\); expected one"),
        (TwoSources(), "k", r"cat is fed by 2 linears \(linear_\d, linear_\d\); expected one"),
        (Interleaved(by_head=True), "qkv", _FUSED),
        (Interleaved(by_head=False), "qkv", _FUSED),
        (ChannelsFirst(sdpa_causal), "k", _SCATTERED),
    ],
    ids=["table", "two linears", "two sources", "GPT-NeoX", "stacked q, k and v", "channels first"],
)
def test_states_without_their_projection(module: nn.Module, missing: str, reason: str) -> None:
    sites = find_attention(export(module))
    outputs = {f"{letter}_proj.output" for letter in "qkv" if letter not in missing}
    # What a linear reads is known even where its channels are not those of one of q, k and v.
    known = "qkv" if reason in (_FUSED, _SCATTERED) else {"q", "k", "v"} - set(missing)
    wanted = STATES | outputs | {f"{letter}_proj.input" for letter in known}
    assert {site.role for site in sites} == wanted
    assert [miss.what for miss in sites.near_misses] == [f"{letter}_proj" for letter in missing]
    assert all(re.fullmatch(reason, miss.reason) for miss in sites.near_misses)


class Grouped(Attention):
    """Queries go from the linear to [B, K, N, S, D] without ever being [B, H, S, D]."""

    def forward(self, x: Tensor) -> Tensor:
        _, k, v = self.project(x)
        q = self.q_proj(x).unflatten(-1, (2, 2, HEAD_DIM)).permute(0, 2, 3, 1, 4)
        return (q @ k.unsqueeze(2).mT).softmax(-1) @ v.unsqueeze(2)


class KeysTransposed(Attention):
    """Keys go from the linear to [B, H, D, S] without ever being [B, H, S, D]."""

    def forward(self, x: Tensor) -> Tensor:
        q, _, v = self.project(x)
        k = self.k_proj(x).transpose(1, 2).unflatten(1, (4, HEAD_DIM))
        return self.o_proj(((q @ k).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("module", "missing", "reason"),
    [
        (Grouped(sdpa_causal, kv_heads=2), "query", r"unflatten reshapes .*: H·N·D is not a merge of heads"),
        (KeysTransposed(sdpa_causal), "key", r"unflatten reshapes .*: H·D is not a merge of heads"),
    ],
    ids=["5-D queries", "transposed keys"],
)
def test_a_tensor_that_is_never_states(module: nn.Module, missing: str, reason: str) -> None:
    sites = find_attention(export(module))
    (miss,) = sites.near_misses
    assert miss.what == f"{missing}_states"
    assert re.match(reason, miss.reason)
    assert {site.role for site in sites if site.role.endswith("_states")} == STATES - {f"{missing}_states"}
