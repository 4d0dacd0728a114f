"""Attention that is no family's: torch's own layer, flex_attention, and cores in a higher-order op's subgraph."""

import pytest
import torch
from own_model import MODELS, quantize
from torch import Tensor, nn

from graphquant.capture import capture
from graphquant.graph import find_attention
from tests.graph.modules import Attention, core_aten, export, sdpa_causal

STATES = ("query_states", "key_states", "value_states")
ALL = (*(f"{letter}_proj.{end}" for end in ("input", "output") for letter in "qkv"), *STATES)
ROLES = dict.fromkeys(("sdpa", "einsum", "flex_attention"), ALL) | {
    "nn.MultiheadAttention": (*(f"{letter}_proj.input" for letter in "qkv"), *STATES)
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("decomposed", [False, True], ids=["training", "core"])
def test_the_models_of_the_example(name: str, decomposed: bool) -> None:
    program = capture(MODELS[name]().eval(), {"x": torch.randn(2, 6, 64)})
    if decomposed:
        program = core_aten(program)
    sites = find_attention(program)
    (layer,) = sites.layers
    assert tuple(site.role for site in layer.sites) == ROLES[name]
    assert {miss.what for miss in sites.near_misses} == (
        {"q_proj", "k_proj", "v_proj"} if name == "nn.MultiheadAttention" else set()
    )
    heads = {role: site.layout.heads for role in STATES if (site := layer.site(role)) is not None}
    kv_heads = 2 if name in ("sdpa", "flex_attention") else 4
    assert heads == {"query_states": 4, "key_states": kv_heads, "value_states": kv_heads}


@pytest.mark.parametrize("name", MODELS)
def test_they_are_quantized(name: str) -> None:
    report, change = quantize(MODELS[name]().eval())
    assert [row.site.rpartition(".")[2] for row in report.rows] == ["key_states", "value_states"]
    assert 0 < change < 0.05


class Casting(Attention):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


class Remembering(Attention):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return super().forward(x)


@pytest.mark.parametrize(
    ("module", "op"), [(Casting(sdpa_causal), "wrap_with_autocast"), (Remembering(sdpa_causal), "wrap_with_set_grad")]
)
def test_a_core_in_a_subgraph_is_a_near_miss(module: nn.Module, op: str) -> None:
    sites = find_attention(export(module))
    assert sites.layers == ()
    (miss,) = sites.near_misses
    assert miss.what == "attention core"
    assert miss.reason.startswith(f"scaled_dot_product_attention is inside of the subgraph of {op}")
    assert miss.reason.endswith("or run_decompositions()")


def test_autocast_is_inlined_by_a_decomposition() -> None:
    assert len(find_attention(export(Casting(sdpa_causal)).run_decompositions()).layers) == 1
