"""Every family, both attention implementations, training IR and core ATen: the same sites, at the right nodes."""

import io

import pytest
import torch

from graphquant.graph import find_attention
from tests.graph.families import (
    CASES,
    FAMILIES,
    IMPLEMENTATIONS,
    ROLES,
    batch,
    eager_values,
    graph_values,
    model,
    program,
)

# A decomposition takes 4 s: where the attention of two cases is one piece of code, one of them is enough.
DECOMPOSED = [
    *((name, "sdpa") for name in (*FAMILIES, "llama-mha")),
    *((name, "eager") for name in ("llama", "qwen3", "smollm3", "phi3", "llama-mqa")),
]
PROGRAMS = [(name, how, False) for name in CASES for how in IMPLEMENTATIONS] + [
    (name, how, True) for name, how in DECOMPOSED
]
every_program = pytest.mark.parametrize(
    ("name", "implementation", "decomposed"),
    PROGRAMS,
    ids=["-".join((name, how, "core" if core else "training")) for name, how, core in PROGRAMS],
)


@every_program
def test_sites(name: str, implementation: str, decomposed: bool) -> None:
    family = CASES[name]
    sites = find_attention(program(name, implementation, decomposed))
    assert sites.near_misses == ()
    assert len(sites.layers) == family.layers
    modules = {path: type(module).__name__ for path, module in model(name, implementation).named_modules()}
    assert dict(sites.modules).items() <= modules.items()
    for index, layer in enumerate(sites.layers):
        path = f"model.layers.{index}.self_attn"
        assert (layer.index, layer.path, layer.module_class) == (index, path, f"{family.config}Attention")
        assert layer.spelling == ("sdpa" if implementation == "sdpa" and not decomposed else "softmax")
        assert tuple(site.role for site in layer.sites) == ROLES
        for site in layer.sites:
            letter = site.role[0]
            heads = family.heads if letter == "q" else family.kv_heads
            dims = {
                "input": "[B, S, 32]",
                "output": f"[B, S, {heads * family.head_dim}]",
                "states": f"[B, {heads}, S, {family.head_dim}]",
            }
            assert site.key == f"{path}.{site.role}"
            assert (site.layer, site.attention) == (index, path)
            assert site.layout.dims == dims[site.role.replace("_", ".").rsplit(".", 1)[-1]]
            if site.role.endswith("_states"):
                assert (site.module, site.module_class) == (path, f"{family.config}Attention")
                assert (site.layout.heads, site.layout.head_dim) == (heads, family.head_dim)
            else:
                assert (site.module, site.module_class) == (f"{path}.{family.linear(letter)}", "Linear")


@every_program
def test_the_node_computes_what_eager_computes_there(name: str, implementation: str, decomposed: bool) -> None:
    exported = program(name, implementation, decomposed)
    seen = eager_values(name, implementation)
    values = graph_values(exported, *batch().values())
    for site in find_attention(exported):
        expected = seen[site.role][site.layer]
        assert values[site.node].shape == expected.shape, site.key
        # A decomposed graph adds in another order; in training IR every bit is equal.
        tolerance = 1e-5 if decomposed else 0.0
        torch.testing.assert_close(values[site.node], expected, rtol=tolerance, atol=tolerance, msg=site.key)


def test_the_values_of_two_roles_are_never_alike() -> None:
    """Without that, comparing values would not tell a query from a key, or before rotary embedding from after it."""
    seen = eager_values("llama", "sdpa")
    flat = [
        states.transpose(1, 2).flatten(2) if states.dim() == 4 else states
        for role in ROLES[3:]
        for states in seen[role]
    ]
    for index, left in enumerate(flat):
        same = [right for right in flat[index + 1 :] if left.shape == right.shape and torch.equal(left, right)]
        # v_proj.output and value_states hold the same numbers in another shape.
        assert len(same) == (1 if index in (4, 5) else 0)


@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.parametrize("decomposed", [False, True], ids=["training", "core"])
def test_after_save_and_load(name: str, decomposed: bool) -> None:
    exported = program(name, "sdpa", decomposed)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    assert find_attention(torch.export.load(file)) == find_attention(exported)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_the_program_is_left_as_it_was(name: str) -> None:
    exported = program(name)
    before = str(exported), dict(exported.range_constraints), exported.graph_module.code
    metadata = [dict(node.meta) for node in exported.graph.nodes]
    find_attention(exported)
    assert (str(exported), dict(exported.range_constraints), exported.graph_module.code) == before
    assert [dict(node.meta) for node in exported.graph.nodes] == metadata
