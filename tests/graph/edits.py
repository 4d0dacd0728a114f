"""Edits of exported graphs: each makes one small change to a family's attention, after which it is none."""

from collections.abc import Callable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import Graph, Node

from graphquant.graph import AttentionSites, find_attention

aten = torch.ops.aten


def edited(exported: Any, edit: Callable[[Graph], None]) -> AttentionSites:
    """The sites of a copy of a program's graph after an edit."""
    graph = deepcopy(exported.graph)
    edit(graph)
    graph.lint()
    module = SimpleNamespace(graph=graph)
    return find_attention(SimpleNamespace(graph_module=module, graph_signature=exported.graph_signature))


def last(graph: Graph, op: Any) -> Node:
    """The last call of an op: the one of the last layer."""
    return graph.find_nodes(op="call_function", target=op)[-1]


def last_products(graph: Graph) -> tuple[Node, Node]:
    """Q·Kᵀ and P·V of the last layer."""
    scores, output = graph.find_nodes(op="call_function", target=aten.matmul.default)[-2:]
    return scores, output


def weight(graph: Graph, end: str) -> Node:
    return next(node for node in graph.nodes if node.op == "placeholder" and node.name.endswith(end))


def softmax_over_queries(graph: Graph) -> None:
    node = last(graph, aten.softmax.int)
    node.args = (node.args[0], 2, *node.args[2:])


def keys_are_a_matrix(graph: Graph) -> None:
    last(graph, aten.scaled_dot_product_attention.default).update_arg(1, weight(graph, "embed_tokens_weight"))


def keys_are_a_weight(graph: Graph) -> None:
    scores, _ = last_products(graph)
    scores.update_arg(1, weight(graph, "q_proj_weight"))


def values_times_weights(graph: Graph) -> None:
    _, output = last_products(graph)
    output.args = (output.args[1], output.args[0])


def scores_of_a_linear(graph: Graph) -> None:
    softmax = last(graph, aten.softmax.int)
    earlier = [node for node in graph.find_nodes(op="call_function", target=aten.linear.default) if node < softmax]
    softmax.update_arg(0, earlier[-1])


def weights_are_summed(graph: Graph) -> None:
    _, output = last_products(graph)
    output.target = aten.maximum.default


def weights_meet_no_values(graph: Graph) -> None:
    _, output = last_products(graph)
    output.update_arg(0, output.args[1])
