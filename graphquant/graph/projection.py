"""From query, key or value states back to the linear that feeds them, through whatever lies between.

Rotary embedding, q/k norms, biases, casts, slices: all are allowed, since what counts is that every path from the
states leads to one linear, and that the heads are a split of its channels. The set of nodes between is found by a
backward search that stops at linears; nothing is matched by name.
"""

from dataclasses import dataclass

from torch.fx import Node

from graphquant.graph import ops
from graphquant.graph.shapes import shape, show, static
from graphquant.graph.writes import family, fills

_MOVES_WEIGHT = ("alias", "cast", "permute", "expand", "reshape")


@dataclass(frozen=True)
class Projection:
    """The linear behind some states: its ``matmul`` node, input ``[B, S, F]`` and output ``[B, S, C]``.

    Of a fused projection that splits heads before it splits q, k and v, no tensor is the output: then it says why.
    """

    matmul: Node
    input: Node
    output: "Node | NoProjection"


@dataclass(frozen=True)
class NoProjection:
    """Why the states have no linear of their own, and at which node the search ended."""

    node: Node
    reason: str


def weight_of(node: Node, inputs: frozenset[str]) -> tuple[Node, Node] | None:
    """(input, weight) of a node that multiplies by a parameter: linear, addmm, mm, bmm or matmul; else None.

    ``inputs`` are the names of the program's own inputs: a product with one of them is no linear.
    """
    kind = ops.kind(node)
    if kind == "linear":
        args = ops.bound(node)
        return args["input"], args["weight"]
    if kind not in ("matmul", "addmm"):
        return None
    left, right = ops.factors(node)
    return (left, right) if _is_parameter(right, inputs) else None


def _is_parameter(node: Node, inputs: frozenset[str] = frozenset()) -> bool:
    """Whether a node is a parameter or buffer, perhaps transposed, expanded, reshaped or cast."""
    while ops.kind(node) in _MOVES_WEIGHT:
        node = ops.first_input(node)
    return ops.kind(node) == "input" and node.name not in inputs


def find_projection(states: Node, heads: int, head_dim: int, inputs: frozenset[str]) -> Projection | NoProjection:
    """The one linear that feeds ``states`` of H heads and D channels, and the tensor in which its H·D channels lie."""
    between, linears = _search(states, inputs)
    foreign = next((node for node in linears if weight_of(node, inputs) is None), None)
    if foreign is not None:
        return NoProjection(
            foreign,
            f"{states.name} is fed by {foreign.name} ({ops.op_name(foreign)}) with a weight; expected a linear on "
            "every path to it",
        )
    if not linears:
        return NoProjection(states, f"no linear feeds {states.name}; expected one linear on every path to it")
    if len(linears) > 1:
        names = ", ".join(sorted(node.name for node in linears))
        return NoProjection(states, f"{states.name} is fed by {len(linears)} linears ({names}); expected one")
    source = weight_of(linears[0], inputs)
    assert source is not None
    return Projection(
        linears[0], _untangle_input(source[0]), _channels_of(linears[0], {*between, linears[0]}, heads, head_dim)
    )


def _channels_of(matmul: Node, members: set[Node], heads: int, head_dim: int) -> Node | NoProjection:
    """The tensor ``[B, S, H·D]`` of a linear's channels on the way to some states, which are the ``members``."""
    output = _output(matmul, members)
    channels = heads * head_dim
    width = static(shape(output)[-1])
    if width != channels:
        part = _part(output, members, channels)
        if part is None:
            return NoProjection(
                output,
                f"{output.name} {show(shape(output))} has {width} channels; expected {heads} heads · {head_dim} = "
                f"{channels}, or a slice of that width",
            )
        output = part
    if len(shape(output)) != 3:
        return NoProjection(output, f"{output.name} has shape {show(shape(output))}; expected [B, S, {channels}]")
    if not _splits_heads(members, channels, heads, head_dim):
        return NoProjection(
            output, f"the {channels} channels of {output.name} are not split into [{heads}, {head_dim}]"
        )
    return output


def _search(states: Node, inputs: frozenset[str]) -> tuple[list[Node], list[Node]]:
    """Backward search: the nodes between, and the products with a weight at which it stopped, each once."""
    between: list[Node] = []
    linears: list[Node] = []
    seen = {states}
    stack = [states]
    while stack:
        node = stack.pop()
        if weight_of(node, inputs) is not None or _projects_otherwise(node, inputs):
            linears.append(node)
            continue
        between.append(node)
        fresh = [source for source in _sources(node) if source not in seen and ops.kind(node) != "shape"]
        seen.update(fresh)
        stack.extend(fresh)
    return between, linears


def _sources(node: Node) -> list[Node]:
    """The tensors that a node's values come from: its inputs, or what is written into one that is filled in place."""
    if ops.kind(node) != "allocate":
        return ops.tensor_inputs(node)
    members = family(node)
    written = (source for write in fills(node) for source in ops.tensor_inputs(write))
    return [source for source in dict.fromkeys(written) if source not in members]


def _projects_otherwise(node: Node, inputs: frozenset[str]) -> bool:
    """Whether a node multiplies by a weight as no linear does: an einsum, a convolution."""
    if ops.kind(node) not in ("einsum", "convolution"):
        return False
    return any(_is_parameter(source, inputs) for source in ops.tensor_inputs(node))


def _output(matmul: Node, members: set[Node]) -> Node:
    """The linear's value ``[B, S, C]``: behind the reshape of a flattened mm, and behind a bias added on its own."""
    node = matmul
    while True:
        users = [user for user in node.users if user in members]
        if len(users) != 1 or shape(users[0])[-1:] != shape(node)[-1:]:
            return node
        user = users[0]
        flattened = ops.kind(user) in ("reshape", "alias") and len(shape(node)) == 2
        biased = ops.kind(user) == "add" and all(
            source is node or _is_bias(source, node) for source in ops.tensor_inputs(user)
        )
        if not (flattened or biased or (ops.kind(user) == "reshape" and len(shape(user)) == 3 == len(shape(node)))):
            return node
        node = user


def _is_bias(node: Node, output: Node) -> bool:
    return _is_parameter(node) and len(shape(node)) == 1 and shape(node)[-1:] == shape(output)[-1:]


def _part(output: Node, members: set[Node], channels: int) -> Node | None:
    """The slice of a fused projection's output that is ``channels`` wide, on the way to these states."""
    frontier = [output]
    while frontier:
        node = frontier.pop()
        if node is not output and len(shape(node)) == 3 and static(shape(node)[-1]) == channels:
            return node
        frontier += [
            user for user in node.users if user in members and ops.kind(user) in ("slice", "split", "getitem", "alias")
        ]
    return None


def _splits_heads(members: set[Node], channels: int, heads: int, head_dim: int) -> bool:
    """Whether some reshape between turns ``[…, H·D]`` into ``[…, H, D]`` (with one head nothing need be split)."""
    if heads == 1:
        return True
    for node in members:
        if ops.kind(node) != "reshape":
            continue
        before, after = shape(ops.first_input(node)), shape(node)
        if static(before[-1]) == channels and [static(dim) for dim in after[-2:]] == [heads, head_dim]:
            return True
    return False


def _untangle_input(node: Node) -> Node:
    """The 3-D tensor behind the flattened or copied input that a decomposed linear reads."""
    while ops.kind(node) in ("reshape", "alias", "expand") and shape(ops.first_input(node))[-1:] == shape(node)[-1:]:
        if len(shape(node)) == 3 and ops.kind(node) not in ("expand", "reshape"):
            break
        node = ops.first_input(node)
    return node
