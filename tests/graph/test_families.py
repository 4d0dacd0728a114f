"""Every family, both attention implementations, training IR and core ATen: the same sites, at the right nodes."""

import io
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

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
    *((name, "sdpa") for name in FAMILIES),
    *((name, "eager") for name in ("llama", "phi3", "llama-mqa")),
]
PROGRAMS = [(name, how, False) for name in CASES for how in IMPLEMENTATIONS] + [
    (name, how, True) for name, how in DECOMPOSED
]
every_program = pytest.mark.parametrize(
    ("name", "implementation", "decomposed"),
    [
        pytest.param(
            name,
            how,
            core,
            marks=pytest.mark.slow if core and name != "llama" else (),
            id="-".join((name, how, "core" if core else "training")),
        )
        for name, how, core in PROGRAMS
    ],
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
    values = {
        role: seen[role][0].transpose(1, 2).flatten(2) if "states" in role else seen[role][0] for role in ROLES[3:]
    }
    alike = [(a, b) for a in values for b in values if a < b and values[a].shape == values[b].shape]
    assert [pair for pair in alike if torch.equal(values[pair[0]], values[pair[1]])] == [
        ("v_proj.output", "value_states")
    ]


@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.parametrize("decomposed", [False, True], ids=["training", "core"])
def test_after_save_and_load(name: str, decomposed: bool) -> None:
    exported = program(name, "sdpa", decomposed)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    assert find_attention(torch.export.load(file)) == find_attention(exported)


def shape_env(exported: ExportedProgram) -> Any:
    """Where a comparison of two symbolic dims would leave a guard."""
    return next(node for node in exported.graph.nodes if node.name == "input_ids").meta["val"].shape[0].node.shape_env


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_the_program_is_left_as_it_was(name: str) -> None:
    exported = program(name)
    before = str(exported), dict(exported.range_constraints), exported.graph_module.code
    metadata = [dict(node.meta) for node in exported.graph.nodes]
    guards = list(shape_env(exported).guards)
    find_attention(exported)
    assert (str(exported), dict(exported.range_constraints), exported.graph_module.code) == before
    assert [dict(node.meta) for node in exported.graph.nodes] == metadata
    assert shape_env(exported).guards == guards
