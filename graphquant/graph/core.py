"""The attention core: softmax(Q·Kᵀ)·V, as one op or spelled out, and the dims of its operands.

A core is anchored at an sdpa op or at a softmax. From a softmax the search goes back through scale, soft-cap, mask
and casts to the product of queries and keys, and forward through casts, dropout and the guard of fully masked rows to
the product with the values. The role of an operand is its argument position, nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from graphquant.graph import ops
from graphquant.graph.layout_walk import Labels
from graphquant.graph.projection import weight_of
from graphquant.graph.shapes import shape, show

_TO_SCORES = ("alias", "cast", "scale", "add", "select_where", "bounded", "reshape", "expand", "cat", "slice")
_TO_VALUES = ("alias", "cast", "scale", "select_where", "reshape", "expand", "slice")
_OPERAND_LABELS: dict[int, Labels] = {3: ("BH", "S", "D"), 4: ("B", "H", "S", "D"), 5: ("B", "H", "N", "S", "D")}
_MAX_DEPTH = 12


@dataclass(frozen=True)
class Operand:
    """An input of the core and the labels of its dims."""

    node: Node
    labels: Labels


@dataclass(frozen=True)
class Core:
    """A matched core: ``anchor`` is its sdpa or softmax node."""

    anchor: Node
    spelling: str
    query: Operand
    key: Operand
    value: Operand


@dataclass(frozen=True)
class NoCore:
    """An anchor that is no attention core, and why."""

    anchor: Node
    reason: str


def find_cores(graph: Graph, inputs: frozenset[str]) -> Iterator[Core | NoCore]:
    """Every sdpa op and softmax of a graph, in program order, matched or with the reason why not.

    ``inputs`` are the names of the program's own inputs, which are no weights however static their shapes.
    """
    for node in graph.nodes:
        kind = ops.kind(node)
        if kind == "sdpa":
            yield _match_sdpa(node)
        elif kind == "softmax":
            yield _match_softmax(node, inputs)


def _match_sdpa(node: Node) -> Core | NoCore:
    operands = [
        Operand(source, _OPERAND_LABELS.get(len(shape(source)), ()))
        for source in node.args[:3]
        if isinstance(source, Node)
    ]
    if len(operands) != 3 or not all(operand.labels for operand in operands):
        return NoCore(node, "its query, key and value are not tensors of 3 to 5 dims")
    return Core(node, "sdpa", *operands)


def _match_softmax(node: Node, inputs: frozenset[str]) -> Core | NoCore:
    rank = len(shape(node))
    dim = ops.bound(node)["dim"] % rank if rank else 0
    if rank not in _OPERAND_LABELS:
        return NoCore(node, f"softmax over {show(shape(node))}; expected scores of 3 to 5 dims, [B, H, S, S]")
    if dim != rank - 1:
        return NoCore(node, f"softmax over dim {dim} of {show(shape(node))}; expected the last dim, the keys")
    scores = _scores(ops.first_input(node), inputs, _MAX_DEPTH)
    if isinstance(scores, str):
        return NoCore(node, scores)
    output = _values(node, inputs)
    if isinstance(output, str):
        return NoCore(node, output)
    query, key = ops.factors(scores)
    value = ops.factors(output)[1]
    ranks = {len(shape(operand)) for operand in (query, key, value)}
    if not ranks <= set(_OPERAND_LABELS):
        return NoCore(node, f"its operands have {sorted(ranks)} dims; expected 3 to 5")
    transposed = _OPERAND_LABELS[len(shape(key))]
    return Core(
        node,
        "softmax",
        Operand(query, _OPERAND_LABELS[len(shape(query))]),
        Operand(key, (*transposed[:-2], "D", "S")),
        Operand(value, _OPERAND_LABELS[len(shape(value))]),
    )


def _scores(node: Node, inputs: frozenset[str], depth: int) -> Node | str:
    """The product Q·Kᵀ behind the input of a softmax, or the deepest reason why there is none."""
    kind = ops.kind(node)
    if kind == "matmul" or ops.op_name(node) == "aten::baddbmm":
        if weight_of(node, inputs) is not None:
            return f"its scores come from the linear {node.name}; expected a product of two activations, Q·Kᵀ"
        return node
    if kind == "linear":
        return f"its scores come from the linear {node.name}; expected a product of two activations, Q·Kᵀ"
    if kind not in _TO_SCORES or depth == 0:
        return f"its scores come from {node.name} ({ops.op_name(node)}); expected a product Q·Kᵀ"
    reasons = []
    for source in ops.tensor_inputs(node):
        if len(shape(source)) < 3:
            continue  # a bias, a condition or a scalar, never the scores
        found = _scores(source, inputs, depth - 1)
        if isinstance(found, Node):
            return found
        reasons.append(found)
    return reasons[0] if reasons else f"its scores come from {node.name} ({ops.op_name(node)}); expected Q·Kᵀ"


def _values(softmax: Node, inputs: frozenset[str]) -> Node | str:
    """The product P·V that reads a softmax's weights as its left operand, or the reason why there is none."""
    frontier: list[tuple[Node, int]] = [(softmax, 0)]
    reason, misplaced = f"nothing multiplies the weights {softmax.name} by values", ""
    while frontier:
        node, depth = frontier.pop(0)
        for user in node.users:
            kind = ops.kind(user)
            if kind == "matmul":
                if ops.factors(user)[0] is node and weight_of(user, inputs) is None:
                    return user
                misplaced = f"{user.name} does not multiply the weights by values from the right; expected P·V"
            elif kind in _TO_VALUES and depth < _MAX_DEPTH:
                frontier.append((user, depth + 1))
            elif kind != "shape":
                reason = f"its weights go to {user.name} ({ops.op_name(user)}); expected a product P·V"
    return misplaced or reason
