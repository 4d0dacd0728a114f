"""ONNX Runtime: an ONNX file of opset 21 with QuantizeLinear and DequantizeLinear where those are exact."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from graphquant.backends.base import YES, Backend, Batch, Capability, Inputs, Lowered, Summary
from graphquant.backends.onnx_graph import name_dims, own_types
from graphquant.config import QuantizationArgs
from graphquant.errors import OutputError
from graphquant.files import check_writable, written_whole
from graphquant.numerics import TensorLayout
from graphquant.passes.dialects import Decomposed, Emit
from graphquant.records import records

OPSET = 21
EXTERNAL_FROM = 1_500_000_000
"""Bytes of weights from which they are kept in a file beside the model: protobuf ends at 2 GB."""
_EXTERNAL_ABOVE = 1024
"""Bytes of a tensor from which it goes there; smaller ones stay where shape inference sees them."""
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
        # Of a float16 tensor, torch's exporter quantizes with scales cast to float16, and dequantizes with others.
        return Decomposed(per_tensor=False, inputs=(torch.float32,))

    def capability(self, args: QuantizationArgs, layout: TensorLayout) -> Capability:
        """Every setting; a per-token scale is ReduceMax, Div and Where."""
        return YES

    def holds(self, dtype: str, *, in_buffer: bool) -> Capability:
        """All but fp8."""
        if dtype.startswith("float8"):
            return Capability(False, "its Concat takes no fp8", "int8, same strategy")
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
        model = exported.model
        name_dims(model, program)
        own_types(model)
        return _Session(model, inputs, sum(1 for _ in records(program)))


class _Session(Lowered):
    def __init__(self, model: Any, inputs: Inputs, pairs: int) -> None:
        import onnx
        import onnx_ir as ir
        import onnxruntime

        self._inputs, self._pairs = inputs, pairs
        self._dedicated = sum(node.op_type == "QuantizeLinear" for node in model.graph)
        self._folder = TemporaryDirectory(prefix="graphquant-")
        self._path = Path(self._folder.name) / "model.onnx"
        self._optimized = Path(self._folder.name) / "optimized.onnx"
        self._external = _weight_bytes(model) > EXTERNAL_FROM
        beside = "model.onnx.data" if self._external else None
        ir.save(model, self._path, external_data=beside, size_threshold_bytes=_EXTERNAL_ABOVE)
        onnx.checker.check_model(str(self._path))
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(self._optimized)
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "optimized.data")
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
        if not self._external:
            with written_whole(path) as temporary:
                copyfile(self._path, temporary)
            return
        data = path.with_name(path.name + ".data")
        with written_whole(path) as temporary, written_whole(data) as weights:  # the weights are in place first
            copyfile(self._path.with_name("model.onnx.data"), weights)
            temporary.write_bytes(_pointing_to(self._path, data.name))

    def summary(self) -> Summary:
        import onnx

        ops = Counter(node.op_type for node in onnx.load(str(self._optimized), load_external_data=False).graph.node)
        integer = {name: ops[name] for name in _INTEGER_OPS if ops[name]}
        details = {name: ops[name] for name in ("QuantizeLinear", "DequantizeLinear")} | integer
        return Summary(
            backend="onnxruntime",
            pairs=self._pairs,
            dedicated=self._dedicated,
            integer_kernels=sum(integer.values()),
            details={f"{name} in the optimized graph": count for name, count in details.items()},
        )


def _weight_bytes(model: Any) -> int:
    return sum(value.const_value.nbytes for value in model.graph.initializers.values())


def _pointing_to(path: Path, name: str) -> bytes:
    """The model at ``path``, its weights in a file of another name beside it."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = name
    return bytes(model.SerializeToString())
