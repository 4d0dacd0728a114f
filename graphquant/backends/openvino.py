"""OpenVINO: an intermediate representation (``.xml`` and ``.bin``), the pairs as FakeQuantize or arithmetic."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from graphquant.backends.base import YES, Backend, Batch, Capability, Inputs, Lowered, Summary
from graphquant.config import QuantizationArgs
from graphquant.errors import OutputError
from graphquant.files import written_whole
from graphquant.numerics import TensorLayout
from graphquant.passes.dialects import Emit, emit_aten
from graphquant.records import records

_INTEGER = ("i8", "u8")
_PRODUCTS = ("FullyConnected", "MatMul", "Convolution", "ScaledDotProductAttention")


class OpenVINO(Backend):
    """Integers work, in arithmetic: its FakeQuantize takes no scales off the first dim, and no dynamic ones."""

    name = "openvino"
    extra = "openvino"
    modules = ("openvino",)
    suffix = ".xml"
    dtypes = ("float32",)
    keeps_state = False

    @property
    def dialect(self) -> Emit:
        """How pairs are said to this backend."""
        return emit_aten

    def capability(self, args: QuantizationArgs, layout: TensorLayout) -> Capability:
        """All integer settings; its conversion to fp8 rounds otherwise than the number format says."""
        if args.type == "float":
            return Capability(
                False, "its conversion to fp8 is not the number format's (1e-2 off)", "int8, same strategy"
            )
        return YES

    def compile(self, program: ExportedProgram, example: Batch, options: Mapping[str, Any]) -> Lowered:
        """Convert, and compile for the CPU in float32."""
        import openvino

        model = openvino.convert_model(program)
        return _Compiled(model, Inputs.of(program), sum(1 for _ in records(program)))


class _Compiled(Lowered):
    def __init__(self, model: Any, inputs: Inputs, pairs: int) -> None:
        import openvino

        self._model, self._inputs, self._pairs = model, inputs, pairs
        # Its default precision is bf16 where the CPU has it, which is another model.
        self._compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(self, inputs: Batch) -> list[Tensor]:
        outputs = self._compiled([value.numpy() for value in self._inputs.flat(inputs)])
        return [torch.from_numpy(outputs[port].copy()) for port in self._compiled.outputs]

    def save(self, path: str | Path) -> None:
        import openvino

        path = Path(path)
        if path.suffix != ".xml":
            raise OutputError(
                f"cannot write {path}: expected a name that ends in .xml; its weights go beside it as .bin"
            )
        with written_whole(path.with_suffix(".bin")) as weights, written_whole(path) as temporary:
            openvino.serialize(self._model, str(temporary), str(weights))

    def summary(self) -> Summary:
        layers = []
        for op in self._compiled.get_runtime_model().get_ordered_ops():
            info = op.get_rt_info()
            if "layerType" in info:
                layers.append((info["layerType"].astype(str), info["runtimePrecision"].astype(str)))
        kinds = Counter(layers)
        integer = sum(
            count for (kind, precision), count in kinds.items() if kind in _PRODUCTS and precision in _INTEGER
        )
        dedicated = sum(count for (kind, _), count in kinds.items() if kind == "FakeQuantize")
        products = {f"{kind} in {precision}": count for (kind, precision), count in kinds.items() if kind in _PRODUCTS}
        return Summary(
            backend="openvino", pairs=self._pairs, dedicated=dedicated, integer_kernels=integer, details=products
        )
