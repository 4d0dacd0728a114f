"""What looks like attention and is none: no layer, and one near miss whose reason is part of the contract."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

from graphquant.config import KVCacheScheme, QuantizationArgs, QuantizationConfig
from graphquant.errors import NoAttentionError
from graphquant.graph import find_attention
from graphquant.plan import make_plan
from tests.graph import edits
from tests.graph.families import program
from tests.graph.modules import HEAD_DIM, HIDDEN, Attention, core_aten, example, export, sdpa_causal


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.softmax(-1) @ (k.mT @ v)


def values_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (v.mT @ (q @ k.mT).softmax(-1)).mT


def turned_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).mT @ v


def weights_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).sum(-1, keepdim=True) * v


class Router(nn.Module):
    """A mixture of experts: the softmax of a linear weighs the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(HIDDEN, 4), nn.Parameter(torch.randn(4, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).softmax(-1) @ self.experts


class TwoDims(Attention):
    """One sequence, one head, no batch."""

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(linear(x[0]) for linear in (self.q_proj, self.k_proj, self.v_proj)))


class Prototypes(Attention):
    """A Hopfield layer: the keys are a weight."""

    def __init__(self) -> None:
        super().__init__(sdpa_causal)
        self.keys = nn.Parameter(torch.randn(4, 9, HEAD_DIM))

    def forward(self, x: Tensor) -> Tensor:
        q, *_ = self.project(x)
        return (q @ self.keys.mT).softmax(-1) @ torch.randn(9, HEAD_DIM)


class Einsum(Attention):
    """Sums over the queries where attention sums over the keys."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        weights = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
        return torch.einsum("bhqk,bhqd->bhkd", weights, v)


class TwoDimScores(Attention):
    """One head of one sequence, without a batch."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x[0]) for linear in (self.q_proj, self.k_proj, self.v_proj))
        return (q @ k.mT).softmax(-1) @ v


NOT_ATTENTION: dict[str, tuple[nn.Module, str]] = {
    "softmax over the queries": (
        Attention(over_queries),
        r"softmax over dim 2 of \[.*\]; expected the last dim, the keys",
    ),
    "linear attention": (Attention(linear_attention), r"scores come from the linear linear; expected a product of two"),
    "V·P": (Attention(values_first), r"matmul_1 does not multiply the weights by values from the right; expected P·V"),
    "scores transposed": (
        Attention(turned_weights),
        r"matmul_1 does not multiply the weights by values from the right",
    ),
    "no values": (Attention(weights_alone), r"its weights go to sum_1 \(aten::sum\); expected a product P·V"),
    "router": (Router(), r"scores come from the linear linear; expected a product of two activations, Q·Kᵀ"),
    "sdpa on 2-D": (TwoDims(sdpa_causal), r"its query, key and value are not tensors of 3 to 5 dims"),
    "keys are a weight": (Prototypes(), r"scores come from the linear matmul; expected a product of two activations"),
    "einsum": (Einsum(sdpa_causal), r"einsum_1 does not sum the weights times values over the keys; expected P·V"),
    "2-D": (TwoDimScores(sdpa_causal), r"softmax over \[.*\]; expected scores of 3 to 5 dims, \[B, H, S, S\]"),
}


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_not_attention(name: str) -> None:
    module, reason = NOT_ATTENTION[name]
    sites = find_attention(export(module))
    assert (sites.layers, len(sites)) == ((), 0)
    (miss,) = sites.near_misses
    assert miss.what == "attention core"
    assert re.search(reason, miss.reason)
    assert miss.source.startswith(("modules.py:", "test_near_misses.py:"))


@pytest.mark.parametrize("name", ["V·P", "keys are a weight"])
def test_not_attention_in_core_aten_either(name: str) -> None:
    sites = find_attention(core_aten(export(NOT_ATTENTION[name][0], dynamic=False)))
    assert (sites.layers, [miss.what for miss in sites.near_misses]) == ((), ["attention core"])
    assert re.search(NOT_ATTENTION[name][1].replace("matmul", "bmm"), sites.near_misses[0].reason)


@pytest.mark.parametrize(
    ("name", "implementation", "edit", "reason"),
    [
        (
            "llama",
            "eager",
            edits.softmax_over_queries,
            r"softmax over dim 2 of \[.*\]; expected the last dim, the keys",
        ),
        ("mistral", "sdpa", edits.keys_are_a_matrix, r"its query, key and value are not tensors of 3 to 5 dims"),
        (
            "qwen2",
            "eager",
            edits.values_times_weights,
            r"matmul(_\d)? does not multiply the weights by values from the",
        ),
        (
            "qwen3",
            "eager",
            edits.keys_are_a_weight,
            r"its scores come from the linear matmul(_\d)?; expected a product",
        ),
        (
            "smollm3",
            "eager",
            edits.scores_of_a_linear,
            r"its scores come from the linear linear_\d+; expected a product",
        ),
        (
            "phi3",
            "eager",
            edits.weights_are_summed,
            r"its weights go to matmul(_\d)? \(aten::maximum\); expected a product P",
        ),
        ("llama", "eager", edits.weights_meet_no_values, r"nothing multiplies the weights softmax by values"),
    ],
)
def test_one_edit_of_a_family(name: str, implementation: str, edit: Callable[[Graph], None], reason: str) -> None:
    exported = program(name, implementation)
    before, after = find_attention(exported), edits.edited(exported, edit)
    assert after.layers == before.layers[:-1]
    (miss,) = after.near_misses
    assert miss.path == before.layers[-1].path
    assert re.match(reason, miss.reason)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(HIDDEN, 4), r"; it has no sdpa op and no softmax$"),
        (Router(), r"; 1 near misses: softmax \(test_near_misses\.py:\d+\): its scores come from the linear"),
    ],
    ids=["nothing", "router"],
)
def test_a_program_without_attention(module: nn.Module, message: str) -> None:
    config = QuantizationConfig(kv_cache_scheme=KVCacheScheme(key=QuantizationArgs()))
    sites = find_attention(export(module))
    assert f"0 attention layers, 0 sites, {len(sites.near_misses)} near misses" in str(sites)
    start = r"^no attention core, softmax\(Q·Kᵀ\)·V, was matched in the program"
    with pytest.raises(NoAttentionError, match=start + message):
        make_plan(sites, config)


def test_a_near_miss_beside_a_match() -> None:
    """A softmax over the logits is no attention, and hides none."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.router = Attention(sdpa_causal), Router()

        def forward(self, x: Tensor) -> Tensor:
            return self.router(self.layer(x))

    sites = find_attention(export(Both(), example()))
    assert [layer.path for layer in sites.layers] == ["layer"]
    assert [(miss.path, miss.what) for miss in sites.near_misses] == [("router", "attention core")]
