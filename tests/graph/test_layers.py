"""Which sites are one layer's, and what they are called: renamed, repeated and shared modules, no metadata at all."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from transformers.models.llama import modeling_llama

from graphquant.graph import AttentionSites, find_attention
from tests.graph.edits import edited
from tests.graph.families import ROLES, batch, graph_values, model, program
from tests.graph.modules import Attention, Stack, eager_values, example, export, sdpa_causal, soft_cap
from tests.graph.projections import ContiguousStates
from tests.graph.sharing import CrossAttention, OneTensor, SharedKeyValue, Twice


def strip(graph: Graph) -> None:
    for node in graph.nodes:
        node.meta.pop("nn_module_stack", None)
        node.meta.pop("stack_trace", None)


def anonymous(sites: AttentionSites) -> list[tuple[object, ...]]:
    """Everything about the sites that no name decides."""
    return [(site.role, site.node, site.layout, site.layer) for site in sites]


class Blk(Attention):
    """Not a word of "attention", "self_attn" or "proj" in it."""


def test_renamed_modules_have_the_same_sites() -> None:
    usual = find_attention(export(Stack(Attention(sdpa_causal), Attention(soft_cap, kv_heads=2))))
    names = ("u", "w", "x", "y")
    odd = find_attention(export(Stack(Blk(sdpa_causal, names=names), Blk(soft_cap, kv_heads=2, names=names))))
    assert anonymous(odd) == anonymous(usual)
    assert odd["layers.1.k_proj.output"].module == "layers.1.w"
    assert odd["layers.1.key_states"].module_class == "Blk"


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_without_metadata(name: str) -> None:
    exported = program(name)
    sites = edited(exported, strip)
    assert anonymous(sites) == anonymous(find_attention(exported))
    assert [site.key for site in sites] == [f"attention_0.{role}" for role in ROLES]
    assert sites.modules == ()
    assert {site.module for site in sites} == {"attention_0", *(f"attention_0.{letter}_proj" for letter in "qkv")}
    assert {site.source for site in sites} == {""}


def test_two_layers_without_metadata_are_numbered() -> None:
    sites = edited(export(Stack(Attention(sdpa_causal), Attention(sdpa_causal))), strip)
    assert [layer.path for layer in sites.layers] == ["attention_0", "attention_1"]


def test_a_module_called_twice_is_two_layers() -> None:
    module = Twice(Attention(sdpa_causal))
    exported = export(module)
    sites = find_attention(exported)
    assert [layer.path for layer in sites.layers] == ["layer", "layer#2"]
    assert {site.module for site in sites} == {"layer", *(f"layer.{letter}_proj" for letter in "qkv")}
    values, last = graph_values(exported, example()), eager_values(module, example())
    assert torch.equal(values[sites["layer#2.key_states"].node], last["key_states"])
    assert not torch.equal(values[sites["layer.key_states"].node], last["key_states"])


def test_attention_in_the_root_module_is_numbered() -> None:
    sites = find_attention(export(Attention(sdpa_causal)))
    assert [layer.path for layer in sites.layers] == ["attention_0"]
    assert sites["attention_0.k_proj.output"].module == "k_proj"


class Core(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa_causal(q, k, v)


def test_a_core_in_a_module_of_its_own() -> None:
    """The layer is what holds the linears too, not the innermost module around the core."""
    sites = find_attention(export(Stack(Attention(Core()))))
    assert [(layer.path, layer.module_class) for layer in sites.layers] == [("layers.0", "Attention")]
    assert ("layers.0.core", "Core") in sites.modules


def test_layers_of_different_head_dim() -> None:
    sites = find_attention(
        export(Stack(Attention(sdpa_causal), Attention(sdpa_causal, heads=2, kv_heads=2, head_dim=4)))
    )
    assert sites.near_misses == ()
    dims = [layer.site("key_states").layout.dims for layer in sites.layers]
    assert dims == ["[B, 4, S, 8]", "[B, 2, S, 4]"]
    assert sites["layers.1.q_proj.output"].layout.dims == "[B, S, 8]"


def test_keys_that_are_the_values() -> None:
    sites = find_attention(export(OneTensor(sdpa_causal)))
    assert len(sites) == 9
    for left, right in (("key_states", "value_states"), ("k_proj.output", "v_proj.output")):
        one, other = sites[f"attention_0.{left}"], sites[f"attention_0.{right}"]
        assert (one.node, one.layout, one.module) == (other.node, other.layout, other.module)


def test_keys_and_values_of_two_layers() -> None:
    sites = find_attention(export(SharedKeyValue()))
    assert len(sites.layers) == 2
    first, second = ({site.role: site.node for site in layer.sites} for layer in sites.layers)
    shared = {role for role in ROLES if first[role] == second[role]}
    assert shared == {role for role in ROLES if role[0] in "kv"}
    assert second["q_proj.output"] != first["q_proj.output"]


@pytest.mark.parametrize("dynamic", [True, False])
def test_keys_that_are_an_input(dynamic: bool) -> None:
    """An input is no weight, however static its shape: q·Kᵀ with it is no linear."""
    exported = export(CrossAttention(sdpa_causal), example(), *torch.randn(2, 2, 4, 5, 8), dynamic=dynamic)
    sites = find_attention(exported)
    assert [site.node for site in sites][-2:] == ["keys", "values"]
    assert [(miss.what, miss.reason.partition(";")[0]) for miss in sites.near_misses] == [
        ("k_proj", "no linear feeds keys"),
        ("v_proj", "no linear feeds values"),
    ]


def test_of_several_names_of_one_tensor_the_first_is_taken() -> None:
    sites = find_attention(export(ContiguousStates()))
    assert all(site.node.startswith("transpose") for site in sites if site.role.endswith("_states"))


def test_a_program_that_was_exported_with_gradients() -> None:
    """As torch.export.export leaves it: what runs under no_grad is a submodule of the graph."""
    kwargs = batch()
    shapes = {key: {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} for key in kwargs}
    exported = torch.export.export(
        model("llama"), (), kwargs | {"use_cache": False}, dynamic_shapes=shapes | {"use_cache": None}, strict=False
    )
    sites = find_attention(exported)
    assert (len(sites), sites.near_misses) == (9, ())
    assert [site.layout for site in sites] == [site.layout for site in find_attention(program("llama"))]


def test_the_source_line_is_the_users_own() -> None:
    """The line that calls F.linear is torch's; what helps is the line that calls the module."""
    file, line = find_attention(program("llama"))["model.layers.0.self_attn.k_proj.output"].source.split(":")
    assert file == "modeling_llama.py"
    assert "self.k_proj(" in Path(modeling_llama.__file__).read_text().splitlines()[int(line) - 1]


def test_an_unknown_key() -> None:
    with pytest.raises(KeyError, match=r"no site 'layers\.9\.key_states'; there are 9, from model\.layers\.0"):
        find_attention(program("llama"))["layers.9.key_states"]


def test_sites_are_values() -> None:
    """They compare, they hold no node, and they cannot be changed."""
    sites = find_attention(program("llama"))
    assert sites == find_attention(program("llama"))
    assert isinstance(sites["model.layers.0.self_attn.key_states"].node, str)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sites.layers[0].index = 1  # type: ignore[misc]
