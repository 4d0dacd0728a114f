"""What a program computes between two nodes, computed once more for all tokens of a cache.

Keys stored before rotary embedding are rotated after they are read, every token for its own position. So the nodes
between are copied as if the whole cache were given at once, from position 0 on, with nothing before it: the sequence
length becomes the cache's, the past's becomes 0, and ``cache_position`` becomes 0, 1, 2, …
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from graphquant.errors import ConvertError
from graphquant.graph import ops
from graphquant.graph.writes import shared
from graphquant.passes.editor import CallBuilder

aten = torch.ops.aten


def cone(end: Node, start: Node) -> list[Node]:
    """The nodes that lead from ``start`` to ``end``, which is the last of them; ``start`` is not one of them."""
    behind = {start}
    stack = [start]
    while stack:
        fresh = [user for user in stack.pop().users if user not in behind]
        behind.update(fresh)
        stack.extend(fresh)
    found: set[Node] = set()
    stack = [end] if end is not start else []
    while stack:
        node = stack.pop()
        if node not in found and node in behind and node is not start:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return sorted(found)


class Replay:
    """Copies nodes for a cache of ``total`` tokens (a number, or a node of it), through one builder of calls."""

    def __init__(
        self, call: CallBuilder, total: Any, sizes: dict[str, Any], positions: Node | None, where: str
    ) -> None:
        self._call, self._total, self._sizes, self._where = call, total, sizes, where
        self._positions = positions
        self._copies: dict[Node, Any] = {}

    def run(self, end: Node, start: Node, values: Node) -> Node:
        """``end`` as it follows from ``values`` in the place of ``start``."""
        self._copies[start] = values
        result = self._copied(end)
        assert isinstance(result, Node)
        return result

    def _copied(self, end: Node) -> Any:
        stack = [end]
        while stack:
            node = stack[-1]
            missing = [source for source in self._sources(node) if source not in self._copies]
            if node in self._copies or not missing:
                self._copies.setdefault(node, self._copy(node))
                stack.pop()
            else:
                stack.extend(missing)
        return self._copies[end]

    def _sources(self, node: Node) -> Sequence[Node]:
        stands = node in self._copies or node is self._positions or ops.op_name(node) == "aten::sym_size"
        return () if stands else node.all_input_nodes

    def _copy(self, node: Node) -> Any:
        if node is self._positions:
            return self._call(aten.arange.default, self._total, device=node.meta["val"].device)
        if ops.op_name(node) == "aten::sym_size":
            return self._sizes.get(str(node.meta["val"]), node)
        if node.op != "call_function":
            if node.name in self._call.editor.user_inputs:
                raise ConvertError(
                    f"{self._where} cannot be stored: what follows it reads the input {node.name}, whose values for "
                    "the earlier tokens are gone; quantize the states instead"
                )
            if node.name in self._call.editor.written_inputs:
                raise ConvertError(
                    f"{self._where} cannot be stored: what follows it reads the state {node.name}, which "
                    "was another for the earlier tokens; quantize the states instead"
                )
            return node
        if any(shared(node).values()):
            raise ConvertError(
                f"{self._where} cannot be stored: {node.name} behind it writes in place; quantize the states instead"
            )
        args: Any
        kwargs: Any
        args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda source: self._copies[source])
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._call.number(node.target, *args)
        return self._call(node.target, *args, **kwargs)
