"""A program in another dialect is the program that ``convert`` makes in that dialect."""

import io

import pytest
import torch
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.errors import ConvertError
from graphquant.passes.dialects import DIALECTS, Decomposed
from graphquant.passes.redialect import redialect
from graphquant.records import records
from tests.passes.helpers import args, assert_same, both, calibrated, config, run
from tests.tiny import tiny_batch

MIXES = {
    "int": both(
        config("states", args("tensor"), args("channel"), args("attn_head", num_bits=4, symmetric=False)),
        config("outputs", args("group"), args("token"), args("attn_head_channel", type="uint", symmetric=False)),
    ),
    "fp8": config("states", args("token", type="float"), args("attn_head_channel", type="float"), args("tensor")),
    "inputs": config("inputs", args("channel"), args("token"), args("tensor")),
}
BATCH = tiny_batch(2, 7, padding=2)


@pytest.mark.parametrize("mix", [name for name in MIXES if name != "inputs"])
@pytest.mark.parametrize("before", DIALECTS)
@pytest.mark.parametrize("after", DIALECTS)
def test_it_is_what_convert_makes(one_layer: ExportedProgram, mix: str, before: str, after: str) -> None:
    prepared = calibrated(one_layer, MIXES[mix])
    source, expected = gq.convert(prepared, dialect=before), gq.convert(prepared, dialect=after)
    text = str(source.graph)
    spoken = redialect(source, DIALECTS[after])
    assert [node.target for node in spoken.graph.nodes] == [node.target for node in expected.graph.nodes]
    names = [[node.name for node in made.graph.nodes if "quantize" in node.name] for made in (spoken, expected)]
    assert names[0] == names[1]
    assert_same(run(spoken, BATCH), run(expected, BATCH))
    assert [record for _, record in records(spoken)] == [record for _, record in records(expected)]
    assert str(source.graph) == text


def test_of_a_program_from_a_file(one_layer: ExportedProgram) -> None:
    file = io.BytesIO()
    quantized = gq.convert(calibrated(one_layer, MIXES["int"]))
    torch.export.save(quantized, file)
    file.seek(0)
    spoken = redialect(torch.export.load(file), DIALECTS["aten"])
    assert_same(run(spoken, BATCH), run(quantized, BATCH))
    assert not any("quantized_decomposed" in str(node.target) for node in spoken.graph.nodes)


def test_ops_that_a_compiler_does_not_take_are_arithmetic(one_layer: ExportedProgram) -> None:
    quantized = gq.convert(calibrated(one_layer, MIXES["int"]))
    spoken = redialect(quantized, Decomposed(per_tensor=False, axes=(3,)))
    targets = [node.target._schema.name for node in spoken.graph.nodes if "quantized_decomposed" in str(node.target)]
    assert targets == ["quantized_decomposed::quantize_per_channel", "quantized_decomposed::dequantize_per_channel"]
    assert_same(run(spoken, BATCH), run(quantized, BATCH))


def test_scales_in_double(one_layer: ExportedProgram) -> None:
    quantized = gq.convert(calibrated(one_layer, MIXES["int"]))
    double = Decomposed(per_tensor=False, scale_dtype=torch.float64, zero_point_dtype=torch.int64)
    spoken = redialect(quantized, double)
    given = {
        tuple(value.meta["val"].dtype for value in node.args[1:3])
        for node in spoken.graph.nodes
        if "quantize_per_channel" in str(node.target)
    }
    assert given == {(torch.float64, torch.int64)}
    torch.testing.assert_close(run(spoken, BATCH), run(quantized, BATCH), rtol=1e-3, atol=1e-5)


def test_a_float_program_stays_as_it_is(one_layer: ExportedProgram) -> None:
    assert str(redialect(one_layer, DIALECTS["aten"]).graph) == str(one_layer.graph)


def test_a_program_that_was_rewritten_is_refused(one_layer: ExportedProgram) -> None:
    lowered = gq.convert(calibrated(one_layer, config("states", args("attn_head")))).run_decompositions()
    with pytest.raises(ConvertError, match=r"^the program was rewritten after convert, and \S+_states is not where"):
        redialect(lowered, DIALECTS["aten"])
