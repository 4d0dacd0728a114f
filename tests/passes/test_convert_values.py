"""Converted programs compute what the prepared module's fake-quant computes, bit for bit, in both dialects."""

from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.graph.sites import STATES
from graphquant.passes.prepared import origin_of
from tests.passes.helpers import (
    FORMATS,
    HEADLESS,
    STRATEGIES,
    args,
    assert_converts_exactly,
    both,
    calibrated,
    config,
    values_at,
)
from tests.passes.modules import Einsum, ThreeInputs, export, x_of
from tests.tiny import tiny_batch, tiny_batches

TRIPLES = [
    ("int8-sym", "int4-asym", "e4m3"),
    ("int2-sym", "int8-asym", "e5m2"),
    ("uint8-sym", "int2-asym", "int4-sym"),
    ("uint8-asym", "e4m3", "int8-asym"),
]
"""Formats of q, k and v, so that four conversions take in every format."""

FIRST = [args("tensor"), args("channel", **FORMATS["int4-asym"]), args("attn_head", **FORMATS["e4m3"])]
SECOND = [
    args("group", **FORMATS["uint8-asym"]),
    args("token", **FORMATS["int8-asym"]),
    args("attn_head_channel", **FORMATS["int4-sym"]),
]
MIXES = {
    "tensor/channel/attn_head states": both(config("states", *FIRST), config("outputs", *SECOND)),
    "group/token/attn_head_channel states": both(config("states", *SECOND), config("outputs", *FIRST)),
}
"""Every strategy once on states and once on outputs."""


def test_the_triples_hold_every_format() -> None:
    assert {name for triple in TRIPLES for name in triple} == FORMATS.keys()


@pytest.mark.parametrize("index", range(len(TRIPLES)))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_and_format_is_exact_on_states_and_outputs(
    one_layer: ExportedProgram, strategy: str, index: int
) -> None:
    states, outputs = (
        [args(strategy, **FORMATS[name]) for name in triple] for triple in (TRIPLES[index], TRIPLES[index - 1])
    )
    prepared = calibrated(one_layer, both(config("states", *states), config("outputs", *outputs)))
    assert_converts_exactly(prepared, tiny_batches())


@pytest.mark.parametrize("triple", TRIPLES, ids="/".join)
@pytest.mark.parametrize("strategy", HEADLESS)
def test_every_strategy_and_format_is_exact_on_inputs(
    three_inputs: ExportedProgram, strategy: str, triple: tuple[str, str, str]
) -> None:
    batches = [{name: x_of(3, 5, seed=seed) for seed, name in enumerate("xyz")}]
    c = config("inputs", *(args(strategy, **FORMATS[name]) for name in triple))
    assert_converts_exactly(calibrated(three_inputs, c, batches), batches)


@pytest.mark.parametrize("mix", MIXES)
def test_states_in_the_order_of_an_einsum_are_exact(mix: str) -> None:
    program = export(Einsum(), x=x_of(2, 5))
    prepared = calibrated(program, MIXES[mix], [{"x": x_of(3, 7, seed=1)}])
    assert {site.layout.kind for site in origin_of(prepared).sites if site.role in STATES} == {"states_bshd"}
    assert_converts_exactly(prepared, [{"x": x_of(1, 1)}, {"x": x_of(3, 7)}])


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("heads", ["heads_4_4", "heads_4_1"])
def test_multi_head_and_multi_query_attention_are_exact(heads: str, mix: str, request: pytest.FixtureRequest) -> None:
    prepared = calibrated(request.getfixturevalue(heads), MIXES[mix])
    assert_converts_exactly(prepared, tiny_batches())
    kv_heads = int(heads[-1])
    layouts = {site.layout.dims for site in origin_of(prepared).sites if site.role in ("key_states", "value_states")}
    assert layouts == {f"[B, {kv_heads}, S, 8]"}


@pytest.mark.parametrize(
    ("dtype", "mix"), [*((torch.bfloat16, mix) for mix in MIXES), (torch.float16, next(iter(MIXES)))], ids=str
)
def test_half_precision_models_keep_their_dtype(dtype: torch.dtype, mix: str, request: pytest.FixtureRequest) -> None:
    program = request.getfixturevalue(f"{str(dtype).removeprefix('torch.')}_program")
    prepared = calibrated(program, MIXES[mix])
    assert prepared(**tiny_batch(1, 3)).dtype == dtype
    assert_converts_exactly(prepared, tiny_batches())
    added = gq.convert(prepared).state_dict.keys() - program.state_dict.keys()
    dtypes = {name.rsplit("_", 1)[-1]: gq.convert(prepared).state_dict[name].dtype for name in added}
    assert dtypes == {"scale": torch.float32, "point": torch.int32}


def test_float64_is_exact_too() -> None:
    batch: dict[str, Any] = {name: x_of(2, 4, seed=seed).double() for seed, name in enumerate("xyz")}
    program = export(ThreeInputs().double(), **batch)
    three = [args("channel"), args(symmetric=False), args("attn_head")]
    assert_converts_exactly(
        calibrated(program, both(config("states", *three), config("outputs", *three)), [batch]), [batch]
    )


def test_a_tensor_scale_gives_the_codes_of_the_arithmetic_by_hand(one_layer: ExportedProgram) -> None:
    quantized = gq.convert(calibrated(one_layer, config("states", args())))
    prefix = "model_layers_0_self_attn_key_states"
    batch = tiny_batches()[0]
    source = gq.find_attention(one_layer)["model.layers.0.self_attn.key_states"].node
    seen = values_at(quantized, [source, f"{prefix}_quantize", f"{prefix}_dequantize"], batch)
    scale = quantized.state_dict["model.layers.0.self_attn.key_states_scale"]
    codes = torch.round(seen[source] * (1 / scale)).clamp(-128, 127)
    assert seen[f"{prefix}_quantize"].dtype == torch.int8
    assert torch.equal(seen[f"{prefix}_quantize"].float(), codes)
    assert torch.equal(seen[f"{prefix}_dequantize"], codes * scale)
