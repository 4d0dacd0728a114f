"""Scales and zero points of a converted program: names, shapes, dtypes, values, and their place in its signature.

Dims of ``one_layer``: 4 query heads, 2 KV heads, head_dim 16; so C is 64 for queries and 32 for keys and values.
"""

import copy

import pytest
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

import graphquant as gq
from tests.passes.helpers import FORMATS, STATIC, args, both, calibrated, config, values_at
from tests.tiny import tiny_batch

ATTENTION = "model.layers.0.self_attn"
SHAPES = {
    ("states", "tensor"): ([1], [1]),
    ("states", "channel"): ([16], [16]),
    ("states", "attn_head"): ([4, 1, 1], [2, 1, 1]),
    ("states", "attn_head_channel"): ([4, 1, 16], [2, 1, 16]),
    ("states", "group"): ([4, 1, 4], [2, 1, 4]),
    ("outputs", "tensor"): ([1], [1]),
    ("outputs", "channel"): ([64], [32]),
    ("outputs", "attn_head"): ([4], [2]),
    ("outputs", "attn_head_channel"): ([64], [32]),
    ("outputs", "group"): ([16], [8]),
    ("inputs", "tensor"): ([1], [1]),
    ("inputs", "channel"): ([32], [32]),
    ("inputs", "group"): ([8], [8]),
}
"""Scale shapes at q and at k and v; the input of all three is one tensor of 32 channels."""
BATCH = tiny_batch(1, 7)
"""S of 7 and B of 1, so that no scale can have a wrong axis and the right length."""


def names(where: str, letter: str) -> str:
    operand = {"q": "query", "k": "key", "v": "value"}[letter]
    return {
        "states": f"{ATTENTION}.{operand}_states",
        "outputs": f"{ATTENTION}.{letter}_proj.output",
        "inputs": f"{ATTENTION}.q_proj.input",
    }[where]


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(("where", "strategy"), SHAPES)
def test_shapes_and_names_in_the_state_dict(
    one_layer: ExportedProgram, where: str, strategy: str, symmetric: bool
) -> None:
    prepared = calibrated(one_layer, config(where, args(strategy, symmetric=symmetric)), [BATCH])
    state_dict = gq.convert(prepared).state_dict
    added = {name: value for name, value in state_dict.items() if name not in one_layer.state_dict}
    expected = {
        f"{names(where, letter)}_{part}": (SHAPES[where, strategy][letter != "q"], dtype)
        for letter in "qkv"
        for part, dtype in (("scale", torch.float32), ("zero_point", torch.int32))
    }
    assert {name: (list(value.shape), value.dtype) for name, value in added.items()} == expected
    for name, value in added.items():
        if name.endswith("_scale"):
            assert (value.isfinite() & (value > 0)).all()
        else:
            assert (value == 0).all() if symmetric else ((value >= -128) & (value <= 127)).all()
    assert symmetric or any(value.any() for name, value in added.items() if name.endswith("zero_point"))


def test_scales_are_those_of_the_observed_range(one_layer: ExportedProgram) -> None:
    prepared = calibrated(one_layer, both(config("states", args()), config("outputs", args("channel"))), [BATCH])
    state_dict = gq.convert(prepared).state_dict
    sites = gq.find_attention(one_layer)
    keys = [names("states", "k"), names("outputs", "k")]
    seen = values_at(one_layer, [sites[key].node for key in keys], BATCH)
    states, output = (seen[sites[key].node] for key in keys)
    assert torch.equal(state_dict[f"{keys[0]}_scale"], states.abs().amax().view(1) / 127.5)
    assert torch.equal(state_dict[f"{keys[1]}_scale"], output.abs().amax((0, 1)) / 127.5)


@pytest.mark.parametrize("size", [1e-30, 0.3, 1e30])
def test_a_scale_is_not_rounded_up_to_one(one_layer: ExportedProgram, size: float) -> None:
    prepared = copy.deepcopy(gq.prepare(one_layer, config("outputs", args())))
    with torch.no_grad():
        prepared.get_parameter(f"{ATTENTION}.v_proj.weight").mul_(size)
    calibration = gq.calibrate(prepared, [BATCH], progress=False)
    key = names("outputs", "v")
    assert float(gq.convert(prepared).state_dict[f"{key}_scale"]) == pytest.approx(calibration[key].amax / 127.5)


def test_constants_are_buffers_with_placeholders_behind_the_parameters(one_layer: ExportedProgram) -> None:
    quantized = gq.convert(calibrated(one_layer, config("states", args("channel")), [BATCH]))
    specs = quantized.graph_signature.input_specs
    placeholders = [node.name for node in quantized.graph.nodes if node.op == "placeholder"]
    assert placeholders == [spec.arg.name for spec in specs]
    added = [spec for spec in specs if spec.target is not None and spec.target not in one_layer.constants]
    added = [spec for spec in added if spec.target not in one_layer.state_dict]
    assert {spec.kind for spec in added} == {InputKind.BUFFER}
    assert all(spec.persistent for spec in added)
    key = [spec.arg.name for spec in added if spec.target.startswith(names("states", "k"))]
    assert key == [f"b_model_layers_0_self_attn_key_states_{part}" for part in ("scale", "zero_point")]
    kinds = [spec.kind for spec in specs]
    lifted = [InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR, InputKind.USER_INPUT]
    assert kinds == sorted(kinds, key=lifted.index)
    assert [s for s in specs if s not in added] == one_layer.graph_signature.input_specs


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(("heads", "strategy"), [("one_layer", "tensor"), ("heads_4_1", "attn_head")])
def test_literals_of_a_single_scale_are_the_constants(
    heads: str, strategy: str, symmetric: bool, request: pytest.FixtureRequest
) -> None:
    program = request.getfixturevalue(heads)
    quantized = gq.convert(calibrated(program, config("states", args(strategy, symmetric=symmetric)), [BATCH]))
    pairs = [n for n in quantized.graph.nodes if "key_states" in n.name and n.op == "call_function"]
    assert [str(node.target) for node in pairs] == [
        "quantized_decomposed.quantize_per_tensor.default",
        "quantized_decomposed.dequantize_per_tensor.default",
    ]
    scale, zero_point = (quantized.state_dict[f"{names('states', 'k')}_{part}"] for part in ("scale", "zero_point"))
    for node in pairs:
        assert node.args[1:] == (scale.item(), zero_point.item(), -128, 127, torch.int8)


@pytest.mark.parametrize("strategy", STATIC)
@pytest.mark.parametrize("numbers", ["int8-sym", "int4-asym", "uint8-sym", "e4m3"])
def test_a_dead_head_stays_exactly_zero(one_layer: ExportedProgram, numbers: str, strategy: str) -> None:
    given = args(strategy, **FORMATS[numbers])
    prepared = copy.deepcopy(gq.prepare(one_layer, both(config("states", given), config("outputs", given))))
    with torch.no_grad():
        prepared.get_parameter(f"{ATTENTION}.k_proj.weight")[16:] = 0.0  # the second of two KV heads
    gq.calibrate(prepared, [BATCH], progress=False)
    quantized = gq.convert(prepared)
    keys = [f"model_layers_0_self_attn_{site}_dequantize" for site in ("key_states", "k_proj_output")]
    seen = values_at(quantized, [*keys, "output"], BATCH)
    states, output = (seen[key] for key in keys)
    assert not states[:, 1].any()
    assert not output[..., 16:].any()
    assert states[:, 0].any()
    scale = quantized.state_dict[f"{names('states', 'k')}_scale"]
    assert (scale.isfinite() & (scale > 0)).all()
    assert seen["output"][0].isfinite().all()
