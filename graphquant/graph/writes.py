"""Storage that nodes share, and tensors that are allocated first and filled in place afterwards."""

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from graphquant.graph import ops


def shared(node: Node) -> dict[Node, bool]:
    """The inputs whose storage the result of a call may share, each with whether the call writes to it."""
    if ops.kind(node) == "getitem":
        return {node.all_input_nodes[0]: False}
    if not isinstance(node.target, torch._ops.OpOverload):
        return {}
    bound = ops.bound(node)
    return {
        bound[argument.name]: argument.alias_info.is_write
        for argument in node.target._schema.arguments
        if argument.alias_info is not None and isinstance(bound.get(argument.name), Node)
    }


def family(node: Node) -> set[Node]:
    """A node, its views, and theirs."""
    members, stack = {node}, [node]
    while stack:
        fresh = [
            user for user in stack.pop().users if user not in members and not shared(user).keys().isdisjoint(members)
        ]
        members.update(fresh)
        stack.extend(fresh)
    return members


def fills(node: Node) -> list[Node]:
    """The calls that write the values of a tensor that was allocated without any, in program order.

    Such a tensor is what it is to be after the last of them: its own node computes nothing.
    """
    if ops.kind(node) != "allocate":
        return []
    members = family(node)
    return sorted(member for member in members if any(writes for writes in shared(member).values()))


def written_buffers(program: ExportedProgram) -> list[str]:
    """The buffers that a program writes to, in place or by its signature."""
    signature = program.graph_signature
    named = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    in_place = [
        named[source.name]
        for node in program.graph.nodes
        for source, writes in shared(node).items()
        if writes and source.name in named
    ]
    return [*signature.buffers_to_mutate.values(), *in_place]
