"""How an attention core reads a stored cache: the codes, what is subtracted from them, and what they are multiplied by.

Of ``values = (codes − zero_point) · scale`` as ``store`` says it, each factor may have been folded away before.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from graphquant.config import QuantizationArgs
from graphquant.graph import ops
from graphquant.graph.shapes import same_shape, shape, static
from graphquant.records import SiteRecord, record_of, records

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default


@dataclass(frozen=True)
class StoredRead:
    """One operand ``[B, H, L, D]`` of a core, read from a stored cache.

    ``operand`` is what the core reads, ``shifted`` the codes less their zero point in float32, ``loaded`` the cache as
    it was read, in its own dtype; ``shift`` was subtracted and ``scale`` multiplies, where they are still there.
    """

    operand: Node
    record: SiteRecord
    shifted: Node
    loaded: Node
    shift: Node | None
    scale: Node | None

    @property
    def args(self) -> QuantizationArgs:
        """How the cache is quantized."""
        return self.record.quantization_args


@dataclass(frozen=True)
class StoredCore:
    """An sdpa whose KV heads are not repeated (or packed), and how it reads keys and values, where those are stored."""

    node: Node
    key: StoredRead | None
    value: StoredRead | None


def stored_cores(graph: Graph) -> Iterator[StoredCore]:
    """The sdpa cores of a graph that read a stored cache without repeating its heads."""
    for node in graph.nodes:
        if node.target is SDPA:
            query, key, value = node.args[:3]
            heads = {static(source.meta["val"].shape[1]) for source in (query, key, value) if isinstance(source, Node)}
            if len(heads) == 1 and all(source.meta["val"].dim() == 4 for source in (query, key, value)):
                core = StoredCore(node, stored_read(key), stored_read(value))
                if core.key or core.value:
                    yield core


def stored_read(operand: Node) -> StoredRead | None:
    """How ``operand`` is read from a stored cache of states ``[B, H, L, D]``; None where it is not."""
    while operand.target is aten.slice.Tensor and same_shape(shape(operand), shape(ops.first_input(operand))):
        operand = ops.first_input(operand)  # all of it, as a batch of any size is sliced
    record = record_of(operand)
    if record is None or record.stored is None or record.tensor_layout.kind != "states":
        return None
    shifted, scale = _undone(_uncast(operand), aten.mul.Tensor)
    codes, shift = _undone(shifted, aten.sub.Tensor)
    return StoredRead(operand, record, shifted, _loaded(codes), shift, scale)


def _undone(node: Node, target: Any) -> tuple[Node, Node | None]:
    """The first operand of a call of ``target`` on two tensors, and the second; of another node, itself."""
    if node.target is not target:
        return node, None
    first, second = node.args[:2]
    return (first, second) if isinstance(first, Node) and isinstance(second, Node) else (node, None)


def _uncast(node: Node) -> Node:
    cast = node.target is aten._to_copy.default and ops.first_input(node).meta["val"].dtype == torch.float32
    return ops.first_input(node) if cast else node


def _loaded(codes: Node) -> Node:
    """The cache behind its codes in float32."""
    node = codes
    while node.meta["val"].is_floating_point() and node.meta["val"].itemsize > 1:
        node = ops.first_input(node)
    return node


def has_caches(program: ExportedProgram) -> bool:
    """Whether any cache of the program is stored."""
    return any(record.stored is not None for _, record in records(program))
