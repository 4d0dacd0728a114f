"""The ONNX file: its dims, its axes, its types, and its weights beside it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from backend_table import Bench, batch

import graphquant as gq
from graphquant.backends import Lowered

pytestmark = pytest.mark.slow
Get = Callable[[str, str], Lowered]


def model_of(artifact: Any) -> onnx.ModelProto:
    return onnx.load(artifact._path, load_external_data=False)


def test_its_dims_are_named(lowered: Get) -> None:
    model = model_of(lowered("onnxruntime", "int8 sym"))
    onnx.checker.check_model(model)
    assert [entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")] == [21]
    shapes = {info.name: [dim.dim_param for dim in info.type.tensor_type.shape.dim] for info in model.graph.input}
    assert shapes == {"input_ids": ["batch", "sequence"], "attention_mask": ["batch", "sequence"]}
    (logits,) = (info.type.tensor_type.shape.dim for info in model.graph.output)
    assert [dim.dim_param or dim.dim_value for dim in logits] == ["batch", "sequence", 64]


@pytest.mark.parametrize("form", ["int8 sym", "int4 asym"])
def test_scales_along_one_dim_are_quantize_linear_with_that_axis(lowered: Get, form: str) -> None:
    """States [B, H, S, D]: per head 1, per channel 3. Outputs [B, S, C]: per channel, head, group or both 2."""
    model = model_of(lowered("onnxruntime", form))
    found = {node.attribute[0].i: _lengths(model, node) for node in model.graph.node if _is_quantize(node)}
    assert sorted(node.attribute[0].i for node in model.graph.node if _is_quantize(node)) == [1, 2, 2, 2, 2, 3]
    assert (found[1], found[3]) == ([2, 2], [8, 8])
    assert found[2] in ([16, 16], [32, 32])


def _is_quantize(node: onnx.NodeProto) -> bool:
    return node.op_type == "QuantizeLinear"


def _lengths(model: onnx.ModelProto, node: onnx.NodeProto) -> list[int]:
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    return [tensors[name].dims[0] for name in node.input[1:]]


@pytest.mark.parametrize(
    ("form", "types"), [("int4 asym", {"INT4"}), ("int8 sym", {"INT8"}), ("uint8 asym", {"UINT8"})]
)
def test_a_pair_of_a_whole_type_is_said_in_it(lowered: Get, form: str, types: set[str]) -> None:
    model = model_of(lowered("onnxruntime", form))
    tensors = {tensor.name: onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in model.graph.initializer}
    assert {tensors[node.input[2]] for node in model.graph.node if _is_quantize(node)} == types
    assert not [node for node in model.graph.node if node.op_type == "Clip" and node.output[0] in _codes(model)]


def _codes(model: onnx.ModelProto) -> set[str]:
    return {node.input[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}


def test_a_range_of_three_bits_keeps_its_clip(bench: Bench) -> None:
    scheme = gq.QuantizationScheme(
        targets=("role:attention",), key_states=gq.QuantizationArgs(num_bits=3, strategy="attn_head")
    )
    program = gq.convert(bench.program, bench.calibration, gq.QuantizationConfig(config_groups={"k": scheme}))
    model = model_of(gq.lower(program, "onnxruntime", examples=[batch(2, 8)]))
    assert sum(node.op_type == "Clip" and node.output[0] in _codes(model) for node in model.graph.node) == 2


def test_weights_beside_the_model(bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("graphquant.backends.onnx.EXTERNAL_FROM", 1000)
    artifact = bench.lowered("onnxruntime", "int8 sym")
    artifact.save(tmp_path / "named.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"named.onnx", "named.onnx.data"}
    inputs = batch(1, 5)
    session = onnxruntime.InferenceSession(str(tmp_path / "named.onnx"))
    (out,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    assert torch.equal(torch.from_numpy(out), artifact.run(inputs)[0])
    assert artifact.summary().dedicated == 6
