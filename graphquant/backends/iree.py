"""IREE: a ``.vmfb`` module for the CPU, the pairs as arithmetic."""

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


class Iree(Backend):
    """Signed integers work, in arithmetic, but for asymmetric scales per token."""

    name = "iree"
    extra = "iree"
    modules = ("iree", "iree.turbine", "iree.runtime")
    suffix = ".vmfb"
    tolerance = 1e-4  # its exp and tanh are approximations
    dtypes = ("float32",)
    keeps_state = False

    @property
    def dialect(self) -> Emit:
        """How pairs are said to this backend."""
        return emit_aten

    def capability(self, args: QuantizationArgs, layout: TensorLayout) -> Capability:
        """All settings of signed integers but one."""
        if args.type == "float":
            return Capability(False, "fp8 was not seen to work on its CPU target", "int8, same strategy")
        if args.type == "uint":
            return Capability(False, "its conversion to uint8 is not right (0.9 off)", "int8, same strategy")
        if args.dynamic and not args.symmetric:
            return Capability(False, "its compiler does not end on an asymmetric scale per token", "token, symmetric")
        return YES

    def holds(self, dtype: str, *, in_buffer: bool) -> Capability:
        """What is one code a byte: two are uint8."""
        if dtype == "uint8":
            return Capability(False, "its conversion to uint8 is not right (0.9 off)", "int8, same strategy")
        return YES

    def compile(self, program: ExportedProgram, example: Batch, options: Mapping[str, Any]) -> Lowered:
        """Decompose to core ATen (it has no lowering of ``aten.diff``), and compile for the CPU."""
        from iree.turbine import aot

        pairs = sum(1 for _ in records(program))
        with torch.no_grad():
            decomposed = program.run_decompositions()
        output: Any = aot.export(decomposed).compile(save_to=None, target_backends=["llvm-cpu"])
        return _Module(bytes(output.map_memory()), Inputs.of(program), pairs)


class _Module(Lowered):
    def __init__(self, binary: bytes, inputs: Inputs, pairs: int) -> None:
        from iree import runtime

        self._binary, self._inputs, self._pairs = binary, inputs, pairs
        context = runtime.SystemContext(config=runtime.Config("local-task"))
        context.add_vm_module(runtime.VmModule.copy_buffer(context.instance, binary))
        self._context = context
        self._main = context.modules.module["main"]

    def run(self, inputs: Batch) -> list[Tensor]:
        outputs = self._main(*(value.numpy() for value in self._inputs.flat(inputs)))
        outputs = outputs if isinstance(outputs, list | tuple) else [outputs]
        return [torch.from_numpy(output.to_host().copy()) for output in outputs]

    def save(self, path: str | Path) -> None:
        if Path(path).suffix != ".vmfb":
            raise OutputError(f"cannot write {path}: expected a name that ends in .vmfb")
        with written_whole(path) as temporary:
            temporary.write_bytes(self._binary)

    def summary(self) -> Summary:
        return Summary(backend="iree", pairs=self._pairs, dedicated=0, integer_kernels=0, details={})
