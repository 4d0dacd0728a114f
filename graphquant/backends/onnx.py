"""ONNX Runtime: an ONNX file of opset 21 with QuantizeLinear and DequantizeLinear where those are exact."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from graphquant.backends.base import YES, Backend, Batch, Capability, Inputs, Lowered, Summary
from graphquant.config import QuantizationArgs
from graphquant.errors import OutputError
from graphquant.files import check_writable, written_whole
from graphquant.numerics import TensorLayout
from graphquant.passes.dialects import Decomposed, Emit
from graphquant.records import records

OPSET = 21
EXTERNAL_FROM = 1_500_000_000
"""Bytes of weights from which they are kept in a file beside the model: protobuf ends at 2 GB."""
_DIMS = ("batch", "sequence")
_INTEGER_OPS = (
    "MatMulInteger",
    "QLinearMatMul",
    "QGemm",
    "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat",
    "QAttention",
)


class OnnxRuntime(Backend):
    """Every setting works: per channel as QuantizeLinear, the rest as arithmetic.

    Of one scale, torch's exporter drops a range narrower than the dtype, and where a Reshape follows, ONNX Runtime's
    optimizer makes a graph that it then refuses.
    """

    name = "onnxruntime"
    extra = "onnx"
    modules = ("onnx", "onnxscript", "onnxruntime")
    suffix = ".onnx"
    dtypes = ("float32", "float16")
    keeps_state = False

    @property
    def dialect(self) -> Emit:
        """How pairs are said to this backend."""
        return Decomposed(per_tensor=False)

    def capability(self, args: QuantizationArgs, layout: TensorLayout) -> Capability:
        """Every setting; a per-token scale is ReduceMax, Div and Where."""
        return YES

    def compile(self, program: ExportedProgram, example: Batch, options: Mapping[str, Any]) -> Lowered:
        """Export, check, and open a session."""
        inputs = Inputs.of(program)
        rest = {name: example[name] for name in inputs.names}
        args = tuple(rest.pop(name) for name in inputs.names[: inputs.positional])
        exported = torch.onnx.export(
            program, args, kwargs=rest, dynamo=True, opset_version=OPSET, optimize=True, verbose=False
        )
        assert exported is not None
        model = exported.model_proto
        _name_dims(model, program)
        return _Session(model, inputs, sum(1 for _ in records(program)))


def _name_dims(model: Any, program: ExportedProgram) -> None:
    """Call the dims of the first input ``batch`` and ``sequence``, wherever they occur."""
    first = str(program.graph_signature.user_inputs[0])
    value = next(node.meta["val"] for node in program.graph.nodes if node.name == first)
    symbols = {str(dim): name for dim, name in zip(value.shape, _DIMS, strict=False) if not isinstance(dim, int)}
    graph = model.graph
    for info in (*graph.input, *graph.output, *graph.value_info):
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\bs\d+\b", lambda found: symbols.get(found[0], found[0]), dim.dim_param)


class _Session(Lowered):
    def __init__(self, model: Any, inputs: Inputs, pairs: int) -> None:
        import onnxruntime

        self._model, self._inputs, self._pairs = model, inputs, pairs
        self._folder = TemporaryDirectory(prefix="graphquant-")
        self._path = Path(self._folder.name) / "model.onnx"
        self._optimized = Path(self._folder.name) / "optimized.onnx"
        _write(model, self._path)
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(self._optimized)
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(self._path), options, providers=["CPUExecutionProvider"])

    def run(self, inputs: Batch) -> list[Tensor]:
        known = [entry.name for entry in self._session.get_inputs()]
        feed = dict(zip(known, (value.numpy() for value in self._inputs.flat(inputs)), strict=True))
        outputs = self._session.run(None, feed)
        return [torch.from_numpy(output) for output in outputs]

    def save(self, path: str | Path) -> None:
        path = Path(path)
        if path.suffix != ".onnx":
            raise OutputError(f"cannot write {path}: expected a name that ends in .onnx")
        check_writable(path)
        if not _is_large(self._model):
            with written_whole(path) as temporary:
                temporary.write_bytes(self._model.SerializeToString())
            return
        data = path.with_name(path.name + ".data")
        with written_whole(data) as weights, written_whole(path) as temporary:
            _write_with_data(self._model, temporary, weights, data.name)

    def summary(self) -> Summary:
        import onnx

        ops = Counter(node.op_type for node in onnx.load(str(self._optimized), load_external_data=False).graph.node)
        integer = {name: ops[name] for name in _INTEGER_OPS if ops[name]}
        dedicated = sum(node.op_type == "QuantizeLinear" for node in self._model.graph.node)
        details = {name: ops[name] for name in ("QuantizeLinear", "DequantizeLinear")} | integer
        return Summary(
            backend="onnxruntime",
            pairs=self._pairs,
            dedicated=dedicated,
            integer_kernels=sum(integer.values()),
            details={f"{name} in the optimized graph": count for name, count in details.items()},
        )


def _is_large(model: Any) -> bool:
    return bool(sum(len(tensor.raw_data) for tensor in model.graph.initializer) > EXTERNAL_FROM)


def _write(model: Any, path: Path) -> None:
    import onnx

    if _is_large(model):
        _write_with_data(model, path, path.with_name("model.onnx.data"), "model.onnx.data")
    else:
        path.write_bytes(model.SerializeToString())
    onnx.checker.check_model(str(path))


def _write_with_data(model: Any, path: Path, weights: Path, name: str) -> None:
    """The model, and its weights in a file that it calls ``name``."""
    import onnx

    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    offset = 0
    with weights.open("wb") as file:
        for tensor in copied.graph.initializer:
            if len(tensor.raw_data) < 1024:
                continue
            size = len(tensor.raw_data)
            file.write(tensor.raw_data)
            onnx.external_data_helper.set_external_data(tensor, name, offset, size)
            tensor.ClearField("raw_data")
            offset += size
    path.write_bytes(copied.SerializeToString())
