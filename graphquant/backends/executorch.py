"""ExecuTorch: a ``.pte`` file, what XNNPACK takes delegated to it, the rest on the portable kernels."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._sympy.value_ranges import ValueRanges

from graphquant.backends.base import YES, Backend, Batch, Capability, Inputs, Lowered, Summary
from graphquant.config import QuantizationArgs
from graphquant.errors import LowerError, OutputError
from graphquant.files import written_whole
from graphquant.numerics import TensorLayout
from graphquant.passes.dialects import Decomposed, Emit
from graphquant.passes.editor import rebuild
from graphquant.records import records

MAX_BATCH, MAX_SEQUENCE = 4, 512
"""What memory is planned for unless told otherwise."""
_QUANTIZE = re.compile(r"\bquantize_per_channel\b")


class ExecuTorch(Backend):
    """Integers work: scales along one dim in its quantize and dequantize kernels, the rest in arithmetic.

    Its memory is planned ahead, so that batch and sequence have a largest size.
    """

    name = "executorch"
    extra = "executorch"
    modules = ("executorch",)
    suffix = ".pte"
    dtypes = ("float32",)
    options = ("max_batch", "max_sequence")

    @property
    def dialect(self) -> Emit:
        """How pairs are said to this backend."""
        # Its kernels end the process when given scales that are not float64, or zero points that are not int64.
        return Decomposed(per_tensor=False, scale_dtype=torch.float64, zero_point_dtype=torch.int64)

    def capability(self, args: QuantizationArgs, layout: TensorLayout) -> Capability:
        """All integer settings."""
        if args.type == "float":
            return Capability(False, "it has no fp8 dtype", "int8, same strategy")
        return YES

    def holds(self, dtype: str, *, in_buffer: bool) -> Capability:
        """What is in a buffer."""
        if not in_buffer:
            return Capability(
                False, "its memory is planned ahead, and a past has no largest size", 'a cache="static" of its codes'
            )
        return YES

    def compile(self, program: ExportedProgram, example: Batch, options: Mapping[str, Any]) -> Lowered:
        """Lower with the XNNPACK partitioner; ``max_batch`` and ``max_sequence`` bound the dynamic dims."""
        import executorch.kernels.quantized  # noqa: F401 (registers its quantize and dequantize kernels)
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.devtools.backend_debug import get_delegation_info
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

        limits = (options.get("max_batch", MAX_BATCH), options.get("max_sequence", MAX_SEQUENCE))
        with bounded(program, limits) as limited:
            edge = to_edge_transform_and_lower(
                limited,
                partitioner=[XnnpackPartitioner()],
                compile_config=EdgeCompileConfig(_check_ir_validity=False),
            )
            buffer = edge.to_executorch().buffer
        graph_module = edge.exported_program().graph_module
        info = get_delegation_info(graph_module)
        dedicated = sum(bool(_QUANTIZE.search(str(node.target))) for node in graph_module.graph.nodes)
        details = {
            "nodes delegated to XNNPACK": info.num_delegated_nodes,
            "nodes on portable kernels": info.num_non_delegated_nodes,
        }
        inputs, pairs = Inputs.of(program), sum(1 for _ in records(program))
        largest = tuple(tuple(_largest(dim, program, limits) for dim in shape) for shape in inputs.shapes)
        summary = Summary(backend=self.name, pairs=pairs, dedicated=dedicated, integer_kernels=0, details=details)
        return _Program(buffer, inputs, largest, summary)


def _symbols(program: ExportedProgram, limits: tuple[int, int]) -> list[tuple[Any, int]]:
    """The batch and sequence dims of the first input that are dynamic, with their limits."""
    first = str(program.graph_signature.user_inputs[0])
    value = next(node.meta["val"] for node in program.graph.nodes if node.name == first)
    return [(dim.node, limit) for dim, limit in zip(value.shape, limits, strict=False) if not isinstance(dim, int)]


def _largest(dim: int | torch.SymInt, program: ExportedProgram, limits: tuple[int, int]) -> tuple[int | None, str]:
    """The largest size of a dim that memory is planned for, if it is bounded at all, and the option that bounds it."""
    if isinstance(dim, int):
        return dim, ""
    for (symbol, limit), option in zip(_symbols(program, limits), ExecuTorch.options[-2:], strict=False):
        if symbol.expr == dim.node.expr:
            return limit, option
    return None, ""


@contextmanager
def bounded(program: ExportedProgram, limits: tuple[int, int]) -> Iterator[ExportedProgram]:
    """The program with a largest batch and sequence, as memory planning wants them.

    Its decompositions trace it anew and ask the shape environment, which the original shares: so only for a while.
    """
    sizes = _symbols(program, limits)
    known = sizes[0][0].shape_env.var_to_range if sizes else {}
    before = dict(known)
    ranges = dict(program.range_constraints)
    try:
        for dim, limit in sizes:
            for table in (known, ranges):
                if dim.expr in table:
                    table[dim.expr] = ValueRanges(min(table[dim.expr].lower, limit), min(table[dim.expr].upper, limit))
        yield rebuild(program, range_constraints=ranges)
    finally:
        known.update(before)


class _Program(Lowered):
    def __init__(
        self,
        buffer: bytes,
        inputs: Inputs,
        largest: tuple[tuple[tuple[int | None, str], ...], ...],
        summary: Summary,
    ) -> None:
        self._buffer, self._inputs, self._largest, self._summary = buffer, inputs, largest, summary
        self.reset()

    def reset(self) -> None:
        from executorch.runtime import Runtime

        self._program = Runtime.get().load_program(self._buffer)
        self._method = self._program.load_method("forward")

    def run(self, inputs: Batch) -> list[Tensor]:
        values = self._inputs.flat(inputs)
        for value, largest in zip(values, self._largest, strict=True):
            for size, (limit, option) in zip(value.shape, largest, strict=True):
                if limit is not None and size > limit:
                    raise LowerError(
                        f"an input {list(value.shape)} is larger than what memory was planned for, "
                        f"{[most for most, _ in largest]}: lower again" + (f" with {option}={size}" if option else "")
                    )
        outputs = self._method.execute(values)
        return [torch.as_tensor(output).clone().detach() for output in outputs]

    def save(self, path: str | Path) -> None:
        if Path(path).suffix != ".pte":
            raise OutputError(f"cannot write {path}: expected a name that ends in .pte")
        with written_whole(path) as temporary:
            temporary.write_bytes(self._buffer)

    def summary(self) -> Summary:
        return self._summary
