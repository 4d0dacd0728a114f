"""The KV caches of a program: where states are joined to those of earlier tokens, in a buffer or an input.

A cache is a place between the states and the core: ``index_copy`` or ``index_put`` into a buffer, ``cat`` with an
input. What is found names nodes, and never holds them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch.export import ExportedProgram
from torch.fx import Node

from graphquant.graph import ops
from graphquant.graph.core import Core, find_cores
from graphquant.graph.layout_walk import walk
from graphquant.graph.products import Operand

INDEXED = ("aten::index_copy", "aten::index_copy_", "aten::index_put", "aten::index_put_")


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A cache of one operand of one core.

    ``place`` is the placeholder of what earlier tokens left, ``write`` the node that joins to it the ``states`` (a
    node) along ``dim``, ``reader`` the node towards the core that reads the whole; ``target`` names the buffer, or the
    input.
    """

    core: str
    operand: str
    place: str
    target: str
    is_buffer: bool
    write: str
    states: str
    dim: int
    reader: str


def find_caches(program: ExportedProgram) -> tuple[Cache, ...]:
    """The caches of a program, in program order, keys before values; one that several cores read is there once."""
    found: dict[str, Cache] = {}
    signature = program.graph_signature
    buffers = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    inputs = frozenset(name for name in signature.user_inputs if isinstance(name, str))
    for core in find_cores(program.graph, inputs):
        if isinstance(core, Core):
            for operand, read in (("key", core.key), ("value", core.value)):
                for cache in _caches(core, operand, read, buffers):
                    found.setdefault(cache.write, cache)
    return tuple(found.values())


def _caches(core: Core, operand: str, read: Operand, buffers: dict[str, str]) -> Iterator[Cache]:
    places, _ = walk(read.node, read.labels) if read.labels else ([], None)
    for reader, place, states in zip([None, *places], places, places[1:], strict=False):
        if states.crossed == "cache":
            source = stored_in(place.node)
            yield Cache(
                core=core.anchor.name,
                operand=operand,
                place=source.name,
                target=str(buffers.get(source.name, source.name)),
                is_buffer=source.name in buffers,
                write=place.node.name,
                states=states.node.name,
                dim=place.labels.index("S"),
                reader=core.anchor.name if reader is None else reader.node.name,
            )


def stored_in(write: Node) -> Node:
    """What the states of a cache write are joined to, seen through ops that only move data."""
    node = ops.bound(write)["tensors"][0] if ops.kind(write) == "cat" else ops.first_input(write)
    while node.op == "call_function":
        node = ops.first_input(node)
    assert isinstance(node, Node)
    return node


def slots(write: Node) -> Node:
    """Where along the sequence an indexed write puts the states: the index of ``index_copy``, or of ``index_put``."""
    args = ops.bound(write)
    index = args["index"] if "index" in args else next(entry for entry in args["indices"] if entry is not None)
    assert isinstance(index, Node)
    return index
