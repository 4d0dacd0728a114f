"""Where a static cache is written: a token's slot has to be its position, if its rotation is to follow from its slot.

A ring buffer writes position p to slot p mod L, and nothing in the graph tells the two apart but the numbers. So the
index is computed, for tokens from the start of the cache to beyond its end, and compared.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from graphquant.errors import ConvertError
from graphquant.graph import ops
from graphquant.graph.caches import slots

_TOKENS = 3


def slot_positions(write: Node, inputs: frozenset[str], length: int, where: str) -> Node:
    """The input ``[S]`` of positions that a write takes for slots of a cache of ``length`` tokens.

    Raises:
        ConvertError: the slots are no positions that an input gives, or wrap around.
    """
    index = slots(write)
    positions = _source(index, inputs)
    if positions is not None:
        for start in (0, 1, length - 1, length, 3 * length + 1):
            given = torch.arange(start, start + _TOKENS)
            found = _computed(index, positions, given)
            if found is None or not torch.equal(found.reshape(-1), given):
                break
        else:
            return positions
    raise ConvertError(
        f"{where} cannot be stored: {index.name}, the slots that its cache is written to, are not the positions of an "
        "input, so that how the states follow from a slot is not known; quantize the states instead"
    )


def _source(index: Node, inputs: frozenset[str]) -> Node | None:
    """The one integer input ``[S]`` behind an index."""
    found, seen, queue = set(), {index}, [index]
    while queue:
        node = queue.pop()
        if node.name in inputs:
            found.add(node)
        elif node.op == "call_function":
            fresh = [source for source in ops.tensor_inputs(node) if source not in seen]
            seen.update(fresh)
            queue.extend(fresh)
    whole = [node for node in found if node.meta["val"].dim() == 1 and not node.meta["val"].is_floating_point()]
    return whole[0] if len(found) == len(whole) == 1 else None


def _computed(node: Node, positions: Node, given: Tensor) -> Any:
    """The value of a node for given positions; None where it follows from something else."""
    if node is positions:
        return given.clone()
    if ops.op_name(node) == "aten::sym_size":
        return _TOKENS
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    values = {source: _computed(source, positions, given) for source in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda source: values[source])
    return node.target(*args, **kwargs)
