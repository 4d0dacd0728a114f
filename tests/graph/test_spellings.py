"""Attention of plain modules: however it is written, the same nine sites, at nodes that compute what eager computes."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from graphquant.graph import find_attention
from tests.graph.families import ROLES, graph_values
from tests.graph.modules import (
    HEAD_DIM,
    SPELLINGS,
    Attention,
    Core,
    core_aten,
    eager_values,
    example,
    export,
    sdpa_causal,
)
from tests.graph.projections import (
    KV_HEADS,
    PROJECTIONS,
    BareMatmul,
    FusedConv1D,
    FusedSplit,
    NormOfStates,
    PartialRotary,
    PastFirst,
    Projecting,
)


def inputs_of(module: nn.Module) -> tuple[Tensor, ...]:
    if not isinstance(module, PastFirst):
        return (example(),)
    return (example(), *torch.randn(2, 2, KV_HEADS, 5, HEAD_DIM, generator=torch.Generator().manual_seed(2)))


def check(exported: ExportedProgram, module: nn.Module, heads: tuple[int, int]) -> None:
    sites = find_attention(exported)
    assert sites.near_misses == ()
    (layer,) = sites.layers
    assert tuple(site.role for site in layer.sites) == ROLES
    inputs = inputs_of(module)
    seen, values = eager_values(module, *inputs), graph_values(exported, *inputs)
    for site in layer.sites:
        expected = seen["input"] if site.role not in seen else seen[site.role]
        assert values[site.node].shape == expected.shape, site.key
        torch.testing.assert_close(values[site.node], expected, rtol=1e-5, atol=1e-5, msg=site.key)
        if not site.role.endswith(".input"):
            assert (site.layout.heads, site.layout.head_dim) == (heads[site.role[0] != "q"], HEAD_DIM)


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_the_core(name: str) -> None:
    spelling = SPELLINGS[name]
    module = spelling.module()
    check(export(module), module, (spelling.heads, spelling.kv_heads))


# The spellings that core ATen tells apart. Static dims of size 1 are ambiguous, and a decomposition of them is fast.
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("sdpa_causal", False),
        ("sdpa_enable_gqa", False),
        ("where_mask", False),
        ("soft_cap", False),
        ("repeat_interleave", False),
        ("multi_query_expand", False),
        ("multi_query_broadcast", False),
        ("one_head", False),
        ("one_head", True),
        ("grouped_queries", True),
        ("one_copy_of_grouped_heads", False),
        ("biased_batched_matmul", False),
        ("tiled_heads", False),
        ("query_scaled_first", False),
    ],
)
def test_spellings_of_the_core_in_core_aten(name: str, dynamic: bool) -> None:
    spelling = SPELLINGS[name]
    module = spelling.module()
    check(core_aten(export(module, dynamic=dynamic)), module, (spelling.heads, spelling.kv_heads))


@pytest.mark.parametrize("shape", [(1, 6), (2, 1), (1, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("name", ["one_head", "soft_cap", "multi_query_expand", "batched_matmul"])
def test_static_shapes_that_look_like_heads(name: str, shape: tuple[int, int]) -> None:
    """One token, one row, and as many rows and tokens as heads: no size tells the dims apart."""
    spelling = SPELLINGS[name]
    exported = export(spelling.module(), example(*shape), dynamic=False)
    sites = find_attention(exported)
    assert sites.near_misses == ()
    assert [site.layout.heads for site in sites if site.role.endswith("_states")] == [
        spelling.heads,
        spelling.kv_heads,
        spelling.kv_heads,
    ]


@pytest.mark.parametrize(
    ("kind", "decomposed"),
    [
        *((kind, False) for kind in PROJECTIONS),
        *((kind, True) for kind in (FusedSplit, FusedConv1D, BareMatmul, NormOfStates, PartialRotary, PastFirst)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "core" if value else "training",
)
def test_ways_from_the_input_to_the_states(kind: type[Projecting], decomposed: bool) -> None:
    torch.manual_seed(0)
    module = kind()
    exported = export(module, *inputs_of(module), dynamic=not decomposed)
    check(core_aten(exported) if decomposed else exported, module, (4, KV_HEADS))


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return sdpa_causal(q.float(), k.float(), v.float()).to(q.dtype)


@pytest.mark.parametrize("core", [sdpa_causal, in_float32, SPELLINGS["masked_fill_and_dropout"].core])
@pytest.mark.parametrize("decomposed", [False, True], ids=["training", "core"])
def test_states_are_in_the_dtype_that_a_cache_would_store(core: Core, decomposed: bool) -> None:
    """Core ATen computes the sdpa op in float32, and has a cast of every operand before it."""
    module = Attention(core).to(torch.bfloat16)
    exported = export(module, example().to(torch.bfloat16), dynamic=False)
    exported = core_aten(exported) if decomposed else exported
    nodes = {node.name: node for node in exported.graph.nodes}
    sites = find_attention(exported)
    assert len(sites) == 9
    assert {nodes[site.node].meta["val"].dtype for site in sites} == {torch.bfloat16}
