"""ExecuTorch: a ``.pte`` file, what XNNPACK takes delegated to it, the rest on the portable kernels."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._sympy.value_ranges import ValueRanges

from graphquant.backends.base import YES, Backend, Batch, Capability, Lowered, Summary
from graphquant.config import QuantizationArgs
from graphquant.errors import LowerError, OutputError
from graphquant.files import written_whole
from graphquant.numerics import TensorLayout
from graphquant.passes.dialects import Emit, emit_aten
from graphquant.passes.editor import rebuild
from graphquant.records import records

MAX_BATCH, MAX_SEQUENCE = 4, 512
"""What memory is planned for unless told otherwise."""


class ExecuTorch(Backend):
    """Integers work, in arithmetic; its memory is planned ahead, so that batch and sequence have a largest size."""

    name = "executorch"
    extra = "executorch"
    modules = ("executorch",)
    suffix = ".pte"
    dtypes = ("float32",)

    @property
    def dialect(self) -> Emit:
        """How pairs are said to this backend."""
        return emit_aten

    def capability(self, args: QuantizationArgs, layout: TensorLayout) -> Capability:
        """All integer settings."""
        if args.type == "float":
            return Capability(False, "it has no fp8 dtype", "int8, same strategy")
        return YES

    def compile(self, program: ExportedProgram, example: Batch, options: Mapping[str, Any]) -> Lowered:
        """Lower with the XNNPACK partitioner; ``max_batch`` and ``max_sequence`` bound the dynamic dims."""
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
        info = get_delegation_info(edge.exported_program().graph_module)
        details = {
            "nodes delegated to XNNPACK": info.num_delegated_nodes,
            "nodes on portable kernels": info.num_non_delegated_nodes,
        }
        names = [str(name) for name in program.graph_signature.user_inputs]
        return _Program(buffer, names, limits, sum(1 for _ in records(program)), details)


@contextmanager
def bounded(program: ExportedProgram, limits: tuple[int, int]) -> Iterator[ExportedProgram]:
    """The program with a largest batch and sequence, as memory planning wants them.

    Its decompositions trace it anew and ask the shape environment, which the original shares: so only for a while.
    """
    first = str(program.graph_signature.user_inputs[0])
    value = next(node.meta["val"] for node in program.graph.nodes if node.name == first)
    sizes = [(dim.node, limit) for dim, limit in zip(value.shape, limits, strict=False) if not isinstance(dim, int)]
    known = sizes[0][0].shape_env.var_to_range if sizes else {}
    before = dict(known)
    ranges = dict(program.range_constraints)
    for dim, limit in sizes:
        for table in (known, ranges):
            if dim.expr in table:
                table[dim.expr] = ValueRanges(table[dim.expr].lower, min(table[dim.expr].upper, limit))
    try:
        yield rebuild(program, range_constraints=ranges)
    finally:
        known.update(before)


class _Program(Lowered):
    def __init__(
        self, buffer: bytes, names: list[str], limits: tuple[int, int], pairs: int, details: Mapping[str, int]
    ) -> None:
        from executorch.runtime import Runtime

        self._buffer, self._names, self._limits = buffer, names, limits
        self._pairs, self._details = pairs, details
        self._program = Runtime.get().load_program(buffer)
        self._method = self._program.load_method("forward")

    def run(self, inputs: Batch) -> list[Tensor]:
        for name, value in inputs.items():
            sizes = zip(value.shape, self._limits, ("max_batch", "max_sequence"), strict=False)
            for size, limit, option in sizes:
                if size > limit:
                    raise LowerError(
                        f"{name} {list(value.shape)} is larger than what memory was planned for, {list(self._limits)}: "
                        f"lower again with {option}={size}"
                    )
        outputs = self._method.execute([inputs[name].contiguous() for name in self._names])
        return [torch.as_tensor(output).clone().detach() for output in outputs]

    def save(self, path: str | Path) -> None:
        if Path(path).suffix != ".pte":
            raise OutputError(f"cannot write {path}: expected a name that ends in .pte")
        with written_whole(path) as temporary:
            temporary.write_bytes(self._buffer)

    def summary(self) -> Summary:
        return Summary(backend="executorch", pairs=self._pairs, dedicated=0, integer_kernels=0, details=self._details)
