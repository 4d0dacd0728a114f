"""The graph of a converted program: the pairs that were planned, in the ops of the dialect, and nothing else new."""

import pytest
import torch
from torch.export import ExportedProgram
from torch.fx import Node

import graphquant as gq
from graphquant.errors import ConvertError
from graphquant.plan import make_plan
from graphquant.records import RECORD, records
from tests.passes.helpers import PLACES, args, both, calibrated, call_names, config, values_at, wiring
from tests.tiny import tiny_batch

EVERYTHING = both(config("states", args("channel")), config("outputs", args("group")), config("inputs", args("token")))
ATTENTION = "model_layers_0_self_attn"


def parts(program: ExportedProgram, part: str) -> dict[str, Node]:
    """Site → its quantize (or dequantize) node, by the records in the graph."""
    marked = [(n, n.meta.get("custom", {}).get(RECORD, {})) for n in program.graph.nodes if n.meta.get("custom")]
    return {record["site"]: node for node, record in marked if record.get("part") == part}


@pytest.mark.parametrize("dialect", ["pt2e", "aten"])
@pytest.mark.parametrize("c", [EVERYTHING, config("outputs", args())], ids=["everything", "outputs"])
def test_exactly_the_planned_sites_have_a_pair_and_no_other_node_is_different(
    tiny_program: ExportedProgram, c: gq.QuantizationConfig, dialect: str
) -> None:
    quantized = gq.convert(calibrated(tiny_program, c), dialect=dialect)
    plan = list(make_plan(gq.find_attention(tiny_program), c))
    first, last = parts(quantized, "quantize"), parts(quantized, "dequantize")
    assert list(first) == list(last) == [node.site for _, node in records(quantized)]
    assert sorted(first) == sorted(planned.key for planned in plan)
    alias = {node.name: planned.site.node for planned in plan for node in [last[planned.key]]}
    old = call_names(tiny_program)
    assert [name for name in call_names(quantized) if name in set(old)] == old
    assert wiring(quantized.graph, old, alias) == wiring(tiny_program.graph, old, {})
    assert quantized.graph_signature.user_inputs == tiny_program.graph_signature.user_inputs
    assert quantized.graph_signature.user_outputs == tiny_program.graph_signature.user_outputs
    assert quantized.range_constraints == tiny_program.range_constraints
    new = set(call_names(quantized)) - set(old)
    assert all(leads_to(node, set(alias)) for node in quantized.graph.nodes if node.name in new)


def leads_to(node: Node, names: set[str]) -> bool:
    """Whether all that comes of a new node goes through the pairs' last nodes."""
    if node.name in names:
        return True
    return bool(node.users) and all(leads_to(user, names) for user in node.users)


@pytest.mark.parametrize(("where", "tensors"), [("states", 3), ("outputs", 3), ("inputs", 1)])
def test_pairs_per_layer(tiny_program: ExportedProgram, where: str, tensors: int) -> None:
    quantized = gq.convert(calibrated(tiny_program, config(where, args())))
    for kind in ("quantize", "dequantize"):
        target = f"quantized_decomposed.{kind}_per_tensor.default"
        count = [node for node in quantized.graph.nodes if str(node.target) == target]
        assert len(count) == 2 * tensors
    (output, *_) = [n for n in quantized.graph.nodes if n.target is torch.ops.aten.scaled_dot_product_attention.default]
    assert not any("quantize" in user.name for user in output.users)  # the attention's output is no site


PER_TENSOR, PER_CHANNEL, ARITHMETIC = "quantize_per_tensor", "quantize_per_channel", "arithmetic"
KINDS = {
    ("states", "tensor"): (PER_TENSOR, None),
    ("states", "channel"): (PER_CHANNEL, 3),
    ("states", "attn_head"): (PER_CHANNEL, 1),
    ("states", "attn_head_channel"): (ARITHMETIC, None),
    ("states", "group"): (ARITHMETIC, None),
    ("states", "token"): (ARITHMETIC, None),
    ("outputs", "tensor"): (PER_TENSOR, None),
    ("outputs", "channel"): (PER_CHANNEL, 2),
    ("outputs", "attn_head"): (PER_CHANNEL, 2),
    ("outputs", "attn_head_channel"): (PER_CHANNEL, 2),
    ("outputs", "group"): (PER_CHANNEL, 2),
    ("outputs", "token"): (ARITHMETIC, None),
    ("inputs", "tensor"): (PER_TENSOR, None),
    ("inputs", "channel"): (PER_CHANNEL, 2),
    ("inputs", "group"): (PER_CHANNEL, 2),
    ("inputs", "token"): (ARITHMETIC, None),
}


@pytest.mark.parametrize(("where", "strategy"), PLACES)
def test_ops_of_the_pt2e_dialect(one_layer: ExportedProgram, where: str, strategy: str) -> None:
    op, axis = KINDS[where, strategy]
    quantized = gq.convert(calibrated(one_layer, config(where, args(strategy, num_bits=4))))
    for part, prefix in (("quantize", ""), ("dequantize", "de")):
        for node in parts(quantized, part).values():
            if op == ARITHMETIC:
                assert str(node.target).startswith("aten.")
            else:
                assert str(node.target) == f"quantized_decomposed.{prefix}{op}.default"
                assert node.args[-3:] == (-8, 7, torch.int8)
            if axis is not None:
                assert node.args[3] == axis
    if op == ARITHMETIC:
        assert not any("quantized_decomposed" in str(node.target) for node in quantized.graph.nodes)


@pytest.mark.parametrize("float_format", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("where", "strategy"), [("states", "tensor"), ("states", "channel"), ("outputs", "channel")])
def test_fp8_is_arithmetic_in_both_dialects(
    one_layer: ExportedProgram, where: str, strategy: str, float_format: str
) -> None:
    prepared = calibrated(one_layer, config(where, args(strategy, type="float", float_format=float_format)))
    for dialect in ("pt2e", "aten"):
        quantized = gq.convert(prepared, dialect=dialect)
        assert not any("quantized_decomposed" in str(node.target) for node in quantized.graph.nodes)
        for node in parts(quantized, "quantize").values():
            assert node.meta["val"].dtype == {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[float_format]


def test_the_aten_dialect_has_core_ops_alone(one_layer: ExportedProgram) -> None:
    quantized = gq.convert(calibrated(one_layer, EVERYTHING), dialect="aten")
    new = set(call_names(quantized)) - set(call_names(one_layer))
    targets = {node.target for node in quantized.graph.nodes if node.name in new}
    assert [str(target) for target in targets if torch.Tag.core not in target.tags] == []


def test_an_unknown_dialect_is_refused_before_any_work(one_layer: ExportedProgram) -> None:
    for dialect in ("PT2E", "onnx", ""):
        with pytest.raises(ConvertError, match=f"^unknown dialect '{dialect}'; there are pt2e, aten$"):
            gq.convert(gq.prepare(one_layer, EVERYTHING), dialect=dialect)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_a_token_has_one_scale_in_every_place(one_layer: ExportedProgram, symmetric: bool) -> None:
    batch = tiny_batch(2, 3)
    given = args("token", symmetric=symmetric)
    c = both(config("states", given), config("outputs", given))
    quantized = gq.convert(gq.prepare(one_layer, c))  # dynamic: no calibration
    for site, shape in (("k_proj_output", (2, 3, 1)), ("key_states", (2, 2, 3, 1)), ("query_states", (2, 4, 3, 1))):
        last = next(node for node in quantized.graph.nodes if node.name == f"{ATTENTION}_{site}_dequantize")
        scale, source = last.args[1].name, f"{ATTENTION}_{site}_quantize"
        seen = values_at(quantized, [scale, source], batch)
        assert seen[scale].shape == shape
        assert (seen[scale] > 0).all()
        assert len(seen[scale].unique()) > 1
        codes = seen[source].flatten(0, -2).long()
        ends = (codes.amax(-1) == 127, codes.amin(-1) <= -127)  # every token uses its whole range
        assert (ends[0] | ends[1] if symmetric else ends[0] & ends[1]).all()


def test_new_nodes_carry_the_module_and_line_of_their_site(one_layer: ExportedProgram) -> None:
    quantized = gq.convert(calibrated(one_layer, EVERYTHING))
    new = set(call_names(quantized)) - set(call_names(one_layer))
    nodes = {node.name: node for node in quantized.graph.nodes}
    for name in new:
        assert nodes[name].meta["val"] is not None
        assert "self_attn" in str(nodes[name].meta["nn_module_stack"]) or "layernorm" in str(nodes[name].meta)
        assert "modeling_llama.py" in nodes[name].meta["stack_trace"]


GOLDEN = """\
%0 = view(value_scale, [2, 1, 4, 1])
%1 = expand(%0, [2, 1, 4, 4])
%2 = clone(%1, memory_format=torch.contiguous_format)
%3 = view(%2, [2, 1, 16])
%4 = view(value_zero_point, [2, 1, 4, 1])
%5 = expand(%4, [2, 1, 4, 4])
%6 = clone(%5, memory_format=torch.contiguous_format)
%7 = view(%6, [2, 1, 16])
%8 = reciprocal(%3)
%9 = mul(value, %8)
%10 = round(%9)
%11 = add(%10, %7)
%12 = clamp(%11, 0, 255)
value_quantize = _to_copy(%12, dtype=torch.uint8)
%14 = _to_copy(value_quantize, dtype=torch.float32)
%15 = sub(%14, %7)
value_dequantize = mul(%15, %3)
query_quantize = quantize_per_tensor(query, <scale>, 0, -128, 127, torch.int8)
query_dequantize = dequantize_per_tensor(query_quantize, <scale>, 0, -128, 127, torch.int8)
key_quantize = quantize_per_channel(key, key_scale, key_zero_point, 3, -8, 7, torch.int8)
key_dequantize = dequantize_per_channel(key_quantize, key_scale, key_zero_point, 3, -8, 7, torch.int8)
… = slice(key_dequantize, 0, 0, 9223372036854775807)
… = slice(value_dequantize, 0, 0, 9223372036854775807)
… = scaled_dot_product_attention(query_dequantize, …, …, …, scale=<scale>)"""


def test_one_attention_block_as_text(one_layer: ExportedProgram) -> None:
    c = config("states", args(), args("channel", num_bits=4, symmetric=False), args("group", type="uint"))
    assert text_of_pairs(gq.convert(calibrated(one_layer, c)), one_layer) == GOLDEN


def text_of_pairs(program: ExportedProgram, original: ExportedProgram) -> str:
    """The new calls of a converted program and the calls that read what comes of them, in names of our own."""
    names = {site.node: site.role.removesuffix("_states") for site in gq.find_attention(original)}
    old, lines = set(call_names(original)), []
    for node in program.graph.nodes:
        given = node.name.split(f"{ATTENTION}_")[-1].replace("_states", "")
        if node.op == "placeholder" or "quantize" in node.name:
            names[node.name] = given
        elif node.name not in old and node.op == "call_function":
            names[node.name] = f"%{len(lines)}"
        elif not any("dequantize" in source.name for source in node.all_input_nodes):
            continue
        if node.op == "call_function":
            lines.append(f"{names.get(node.name, '…')} = {call_text(node, names)}")
    return "\n".join(lines)


def call_text(node: Node, names: dict[str, str]) -> str:
    """``op(arguments)``, a literal scale as ``<scale>``."""

    def text(argument: object) -> str:
        if isinstance(argument, Node):
            return names.get(argument.name, "…")
        return "<scale>" if isinstance(argument, float) and not argument.is_integer() else str(argument)

    words = [*map(text, node.args), *(f"{key}={text(value)}" for key, value in node.kwargs.items())]
    return f"{str(node.target).split('.')[1]}({', '.join(words)})"
