"""From a softmax to the two products around it: back to the scores Q·Kᵀ, and forward to the output P·V.

Back it goes through scale, soft-cap, mask, sinks and casts; forward through casts, dropout and the guard of fully
masked rows. Between them the dims may be moved (an einsum in core ATen moves them), so they carry labels here too: S
of the queries, T of the keys.
"""

from torch.fx import Node

from graphquant.graph import ops
from graphquant.graph.layout_walk import Labels, Stop, step, walk
from graphquant.graph.products import is_product, value_of
from graphquant.graph.projection import weight_of
from graphquant.graph.shapes import shape

SCORE_LABELS: dict[int, Labels] = {
    2: ("S", "T"),
    3: ("BH", "S", "T"),
    4: ("B", "H", "S", "T"),
    5: ("B", "H", "N", "S", "T"),
}
_POINTWISE = ("alias", "cast", "scale", "add", "select_where", "bounded", "cat", "slice")
_MOVES = ("permute", "unsqueeze", "squeeze", "reshape", "expand")
_TO_OUTPUT = ("alias", "cast", "scale", "select_where", "slice", *_MOVES)
_MAX_DEPTH = 12


def find_scores(softmax: Node, inputs: frozenset[str]) -> tuple[Node, bool] | str:
    """The product behind a softmax, and whether it is K·Qᵀ, the keys first; else the deepest reason why there is none.

    ``inputs`` are the names of the program's own inputs, which are no weights however static their shapes.
    """
    source = ops.first_input(softmax)
    return _scores(source, SCORE_LABELS.get(len(shape(source)), ()), inputs, _MAX_DEPTH)


def _scores(node: Node, labels: Labels, inputs: frozenset[str], depth: int) -> tuple[Node, bool] | str:
    kind = ops.kind(node)
    if kind == "matmul" or ops.op_name(node) == "aten::baddbmm" or is_product(node):
        if weight_of(node, inputs) is not None:
            return f"its scores come from the linear {node.name}; expected a product of two activations, Q·Kᵀ"
        return node, labels[-1:] == ("S",)
    if kind == "linear":
        return f"its scores come from the linear {node.name}; expected a product of two activations, Q·Kᵀ"
    if kind not in (*_POINTWISE, *_MOVES) or depth == 0:
        return f"its scores come from {node.name} ({ops.op_name(node)}); expected a product Q·Kᵀ"
    if kind in _MOVES:
        place = step(node, labels)
        if not isinstance(place, Stop):
            return _scores(place.node, place.labels, inputs, depth - 1)
    reasons = []
    for source in ops.tensor_inputs(node):
        rank = len(shape(source))
        if rank not in SCORE_LABELS or rank < min(3, len(labels)):
            continue  # a bias, a condition or a scalar, never the scores
        found = _scores(source, labels if rank == len(labels) else SCORE_LABELS[rank], inputs, depth - 1)
        if not isinstance(found, str):
            return found
        reasons.append(found)
    return reasons[0] if reasons else f"its scores come from {node.name} ({ops.op_name(node)}); expected Q·Kᵀ"


def find_output(softmax: Node, inputs: frozenset[str]) -> tuple[Node, Node] | str:
    """The product P·V that reads a softmax's weights, and the weights as it reads them; else why there is none."""
    frontier: list[tuple[Node, int]] = [(softmax, 0)]
    reason, misplaced = f"nothing multiplies the weights {softmax.name} by values", ""
    while frontier:
        node, depth = frontier.pop(0)
        for user in node.users:
            kind = ops.kind(user)
            if kind == "matmul":
                left = ops.factors(user)[0] is node and weight_of(user, inputs) is None
                if left and _keys_last(node, softmax):
                    return user, node
                misplaced = f"{user.name} does not multiply the weights by values from the right; expected P·V"
            elif is_product(user):
                if value_of(user, node).labels:
                    return user, node
                misplaced = f"{user.name} does not sum the weights times values over the keys; expected P·V"
            elif kind in _TO_OUTPUT and depth < _MAX_DEPTH:
                frontier.append((user, depth + 1))
            elif kind != "shape":
                reason = f"its weights go to {user.name} ({ops.op_name(user)}); expected a product P·V"
    return misplaced or reason


def _keys_last(weights: Node, softmax: Node) -> bool:
    """Whether the last dim of ``weights``, which a product sums over, is that of the keys at the softmax."""
    places, _ = walk(weights, SCORE_LABELS.get(len(shape(weights)), ()))
    here = next((place.labels for place in places if place.node is softmax), None)
    return here is None or here[-1:] == ("T",)
