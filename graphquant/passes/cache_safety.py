"""Which caches may hold codes: those that share no memory, and that nothing but their attention reads."""

from collections.abc import Mapping

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from graphquant.errors import ConvertError
from graphquant.graph import ops
from graphquant.graph.caches import Cache

_INTO_BUFFERS = ("aten::index_copy_", "aten::index_put_")


def refuse_unsafe(program: ExportedProgram, found: Mapping[str, Cache]) -> None:
    """Refuse caches, by the key of the site that they are to hold, that cannot hold codes.

    Raises:
        ConvertError: naming the cache, and what reads it or shares its memory.
    """
    nodes = {node.name: node for node in program.graph.nodes}
    owners = _owners(program)
    for key, cache in found.items():
        where = f"the cache {cache.target} of {key}"
        shares = [other for other in owners.get(cache.target, []) if other != cache.target]
        if cache.is_buffer and shares:
            raise ConvertError(f"{where} shares its memory with {shares[0]}: give each its own, or leave one out")
        _refuse_write(nodes[cache.write], cache, where)
        reader = _foreign_reader(nodes, cache)
        if reader is not None:
            raise ConvertError(
                f"{where} is also read by {reader.name} ({ops.op_name(reader)}), which expects floats: leave the site "
                "out with ignore, or convert without kv_cache='stored'"
            )


def _owners(program: ExportedProgram) -> dict[str, list[str]]:
    """For each tensor of the program, all that lie in the same memory."""
    by_memory: dict[int, list[str]] = {}
    for target, value in {**program.constants, **program.state_dict}.items():
        if isinstance(value, Tensor) and value.numel():
            by_memory.setdefault(value.untyped_storage().data_ptr(), []).append(target)
    return {target: targets for targets in by_memory.values() for target in targets}


def _refuse_write(write: Node, cache: Cache, where: str) -> None:
    expected = "index_copy_ or index_put_ into the buffer itself" if cache.is_buffer else "cat with the input itself"
    if cache.is_buffer:
        direct = ops.op_name(write) in _INTO_BUFFERS and write.args[0] is not None
        source = write.args[0] if direct else None
    else:
        source = ops.bound(write)["tensors"][0] if ops.kind(write) == "cat" else None
    if not isinstance(source, Node) or source.name != cache.place:
        raise ConvertError(
            f"{where} is written by {write.name} ({ops.op_name(write)}); expected {expected}: convert before "
            "run_decompositions, or without kv_cache='stored'"
        )


def _foreign_reader(nodes: Mapping[str, Node], cache: Cache) -> Node | None:
    """A node that reads the cache, before or after it is written, and is no part of its attention."""
    write = nodes[cache.write]
    allowed = {cache.reader} if cache.is_buffer else {cache.reader, "output"}
    readers = [user for user in nodes[cache.place].users if user is not write]
    readers += [user for user in write.users if user.name not in allowed]
    return next((user for user in readers if ops.kind(user) != "shape"), None)
