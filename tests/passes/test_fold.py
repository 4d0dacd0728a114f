"""fold_scales: each kind of fold is exact, alone and together, and what cannot be folded is left or refused."""

from typing import Any

import pytest
import torch
from torch import nn

import graphquant as gq
from graphquant.errors import ConvertError
from tests.passes.stepping import TOKENS, run
from tests.passes.stored import both, calls, captured, logits, projections, static
from tests.tiny import tiny_batches

FORMATS = (
    {"num_bits": 8},
    {"num_bits": 4, "symmetric": False},
    {"type": "uint", "symmetric": False},
    {"type": "float"},
)
STATIC = ("tensor", "channel", "attn_head", "attn_head_channel", "group")
STEPS = (4, 1, 5)
FOLDS = (
    {"values": False},
    {"keys": False, "o_proj": False},
    {"keys": False},
    {},
)


def setting(strategy: str, number: dict[str, Any]) -> gq.QuantizationConfig:
    return both(strategy=strategy, **number, **({"group_size": 4} if strategy == "group" else {}))


@pytest.mark.parametrize("number", FORMATS, ids=str)
@pytest.mark.parametrize("strategy", STATIC)
def test_every_fold_is_exact(strategy: str, number: dict[str, Any]) -> None:
    packed = gq.pack_gqa(static(setting(strategy, number)))
    expected = logits(packed, STEPS)
    for fold in FOLDS:
        torch.testing.assert_close(logits(gq.fold_scales(packed, **fold), STEPS), expected, rtol=1e-5, atol=1e-6)


def test_what_is_left_of_a_read_is_a_cast() -> None:
    packed = gq.pack_gqa(static(setting("attn_head_channel", {})))
    folded = gq.fold_scales(packed)
    # Two layers: the scales of keys move onto the queries, those of values leave the graph for o_proj's weight.
    assert calls(packed, "mul") - calls(folded, "mul") == 2
    for core in (node for node in folded.graph.nodes if "scaled_dot_product" in str(node.target)):
        for operand in core.args[1:3]:
            assert str(operand.target) == "aten._to_copy.default"
            assert operand.args[0].meta["val"].dtype == torch.int8
    assert len(gq.report(folded).rows) == len(gq.report(packed).rows) == 4


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_scale_of_values_is_in_the_weight_of_the_projection_behind(kv_heads: int) -> None:
    packed = gq.pack_gqa(static(setting("attn_head_channel", {}), kv_heads))
    folded = gq.fold_scales(packed)
    name, site = "model.layers.1.self_attn.o_proj.weight", "model.layers.1.self_attn.value_states_scale"
    columns = packed.state_dict[site].reshape(kv_heads, 8).repeat_interleave(4 // kv_heads, dim=0).reshape(-1)
    torch.testing.assert_close(folded.state_dict[name], nn.Parameter(packed.state_dict[name] * columns))
    torch.testing.assert_close(logits(folded, STEPS), logits(packed, STEPS), rtol=1e-5, atol=1e-6)


def test_the_program_that_was_folded_is_left_as_it_was() -> None:
    packed = gq.pack_gqa(static(setting("channel", {})))
    before, weights = str(packed.graph), {name: value.clone() for name, value in packed.state_dict.items()}
    gq.fold_scales(packed)
    assert str(packed.graph) == before
    assert all(torch.equal(packed.state_dict[name], value) for name, value in weights.items())


@pytest.mark.parametrize("strategy", STATIC)
def test_past_and_present_of_any_batch_are_folded(strategy: str) -> None:
    """A batch of any size leaves a slice of all of it between the read and the core."""
    config = setting(strategy, {"num_bits": 4, "symmetric": False})
    seen = gq.calibrate(gq.prepare(captured(), config), tiny_batches(), progress=False)
    packed = gq.pack_gqa(gq.convert(captured(cache="inputs"), seen, config, kv_cache="stored"))
    folded = gq.fold_scales(packed)
    assert calls(packed, "mul") - calls(folded, "mul") == 2
    torch.testing.assert_close(run(folded, TOKENS, STEPS), run(packed, TOKENS, STEPS), rtol=1e-5, atol=1e-6)


def test_a_scale_per_token_stays() -> None:
    packed = gq.pack_gqa(static(both(strategy="token")))
    assert str(gq.fold_scales(packed).graph) == str(packed.graph)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: captured(), r"the program stores no cache: convert it with kv_cache='stored' first"),
        (lambda: static(both()), r"no attention reads a stored cache as states without repeating its heads: pack_gqa"),
        (lambda: gq.pack_gqa(static(projections(strategy="channel"))), r"no attention reads a stored cache as states"),
    ],
)
def test_what_cannot_be_folded(make: Any, message: str) -> None:
    with pytest.raises(ConvertError, match=f"^{message}"):
        gq.fold_scales(make())
