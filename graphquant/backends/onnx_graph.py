"""What an exported ONNX graph is given before it is saved: names of its dims, and quantized types of its own."""

import re
from typing import Any

from torch.export import ExportedProgram

_DIMS = ("batch", "sequence")
_RANGES = {(-8, 7): "INT4", (0, 15): "UINT4", (-128, 127): "INT8", (0, 255): "UINT8"}


def name_dims(model: Any, program: ExportedProgram) -> None:
    """Call the dims of the first input ``batch`` and ``sequence``, wherever they occur."""
    import onnx_ir as ir

    first = str(program.graph_signature.user_inputs[0])
    value = next(node.meta["val"] for node in program.graph.nodes if node.name == first)
    symbols = {str(dim): name for dim, name in zip(value.shape, _DIMS, strict=False) if not isinstance(dim, int)}

    def named(dim: Any) -> Any:
        if isinstance(dim, int) or dim.value is None:
            return dim
        return ir.SymbolicDim(re.sub(r"\bs\d+\b", lambda found: symbols.get(found[0], found[0]), dim.value))

    produced = [output for node in model.graph.all_nodes() for output in node.outputs]
    for value in (*model.graph.inputs, *produced):
        if value.shape is not None:
            value.shape = ir.Shape([named(dim) for dim in value.shape])


def own_types(model: Any) -> None:
    """Pairs of whole types, 4 bits or 8, as ONNX says them: without the Clip that stands between the two ops."""
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    for quantize in [node for node in model.graph if node.op_type == "QuantizeLinear"]:
        pair = _clipped_pair(quantize)
        if pair is None:
            continue
        clip, readers, dtype = pair
        old = quantize.inputs[2]
        values = old.const_value.numpy().astype(dtype.numpy())
        zero_point = ir.val(f"{old.name}_{dtype.name.lower()}", const_value=ir.tensor(values, dtype))
        zero_point = model.graph.initializers.setdefault(zero_point.name, zero_point)
        for node in (quantize, *readers):
            node.replace_input_with(2, zero_point)
        clip.outputs[0].replace_all_uses_with(quantize.outputs[0])
        quantize.outputs[0].dtype = dtype
        model.graph.remove(clip, safe=True)
    RemoveUnusedNodesPass()(model)


def _clipped_pair(quantize: Any) -> tuple[Any, list[Any], Any] | None:
    """The Clip behind a QuantizeLinear, the DequantizeLinears behind that, and the type whose range it clips to.

    None where that is not all there is: other readers, other zero points, or values that are no constants.
    """
    import onnx_ir as ir

    codes = quantize.outputs[0]
    clips = list(codes.consumers())
    if [node.op_type for node in clips] != ["Clip"] or codes.is_graph_output() or len(quantize.inputs) != 3:
        return None
    clipped, zero_point = clips[0].outputs[0], quantize.inputs[2]
    readers = list(clipped.consumers())
    same = all(node.op_type == "DequantizeLinear" and zero_point in node.inputs[2:] for node in readers)
    constants = (*clips[0].inputs[1:], zero_point)
    if not same or clipped.is_graph_output() or any(value is None or value.const_value is None for value in constants):
        return None
    limits = tuple(int(value.const_value.numpy()) for value in clips[0].inputs[1:])
    return (clips[0], readers, ir.DataType[_RANGES[limits]]) if limits in _RANGES else None
