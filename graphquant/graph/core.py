"""The attention core: softmax(Q·Kᵀ)·V, as one op or spelled out, and the dims of its operands.

A core is anchored at an sdpa op or at a softmax; from a softmax the search goes to the two products around it. The
role of an operand is its argument position, nothing else.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from graphquant.graph import ops
from graphquant.graph.products import OPERAND_LABELS, Operand, query_and_key, value_of
from graphquant.graph.scores import find_output, find_scores
from graphquant.graph.shapes import shape, show


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
            match = _match_softmax(node, inputs)
            if match is not None:
                yield match


def hidden_cores(module: GraphModule, inputs: frozenset[str]) -> Iterator[tuple[Node, Node]]:
    """Every node that calls a subgraph with an attention core in it, with the core's anchor."""
    for node in module.graph.nodes:
        for source in node.all_input_nodes:
            part = getattr(module, str(source.target), None) if source.op == "get_attr" else None
            if isinstance(part, GraphModule):
                anchors = [match.anchor for match in find_cores(part.graph, inputs) if isinstance(match, Core)]
                deeper = [anchor for _, anchor in hidden_cores(part, inputs)]
                yield from ((node, anchor) for anchor in (*anchors, *deeper))


def _match_sdpa(node: Node) -> Core | NoCore:
    operands = [
        Operand(source, OPERAND_LABELS.get(len(shape(source)), ()))
        for source in node.args[:3]
        if isinstance(source, Node)
    ]
    if len(operands) != 3 or not all(operand.labels for operand in operands):
        return NoCore(node, "its query, key and value are not tensors of 3 to 5 dims")
    return Core(node, "sdpa", *operands)


def _match_softmax(node: Node, inputs: frozenset[str]) -> Core | NoCore | None:
    rank = len(shape(node))
    dim = ops.bound(node)["dim"] % rank if rank else 0
    scores = find_scores(node, inputs)
    if rank not in OPERAND_LABELS:
        if isinstance(scores, str):
            return None  # the router of a mixture of experts, a classifier: not even alike
        return NoCore(node, f"softmax over {show(shape(node))}; expected scores of 3 to 5 dims, [B, H, S, S]")
    if dim != rank - 1:
        return NoCore(node, f"softmax over dim {dim} of {show(shape(node))}; expected the last dim, the keys")
    if isinstance(scores, str):
        return NoCore(node, scores)
    output = find_output(node, inputs)
    if isinstance(output, str):
        return NoCore(node, output)
    operands = (*query_and_key(*scores), value_of(*output))
    wrong = next((operand for operand in operands if not operand.labels), None)
    if wrong is not None:
        return NoCore(node, f"its operand {wrong.node.name} {show(shape(wrong.node))} is no [B, H, S, D] in any order")
    return Core(node, "softmax", *operands)
