"""Where new calls may stand, who is to read what they make, and which tensors a copy would miss writes to."""

from collections.abc import Mapping

from torch.fx import Node

from graphquant.errors import ConvertError
from graphquant.graph import AttentionSites, ops
from graphquant.graph.writes import family, fills, shared
from graphquant.plan import PlannedSite


def insertion_point(node: Node) -> Node:
    """Where calls on a node's value may start: behind it, behind what fills it, and behind the last placeholder."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return next(reversed(fills(node)), node)


def readers(node: Node, planned: PlannedSite, sites: AttentionSites, nodes: Mapping[str, Node]) -> list[Node]:
    """The users of a site's tensor that are to read its quantized values.

    All that read values, and not only its shape or dtype; of the input of some projections, theirs alone: other
    projections, an MLP beside the attention and a residual sum may read the same tensor.
    """
    start = insertion_point(node)
    users = [user for user in node.users if ops.kind(user) != "shape" and (user > start or not fills(node))]
    if not planned.site.role.endswith(".input"):
        return users
    towards: set[Node] = set()
    stack = [nodes[sites[key.removesuffix("input") + "output"].node] for key in planned.keys]
    while stack:
        member = stack.pop()
        towards.add(member)
        stack.extend(source for source in member.all_input_nodes if source is not node and source not in towards)
    return [user for user in users if user in towards]


def refuse_in_place(node: Node, planned: PlannedSite) -> None:
    """Refuse a site whose tensor is overwritten later, itself or by what it is a view of: a copy would miss the write.

    Raises:
        ConvertError: naming the op.
    """
    base = node
    while sources := shared(base):
        base = next(iter(sources))
    members = {base} if base is node else family(base)
    start = insertion_point(node) if fills(node) else node
    views = family(node) if fills(node) else set()
    early = [user for user in node.users if user < start and user not in views and ops.kind(user) != "shape"]
    # A view that was taken before the tensor was filled: what reads it later would miss the quantized values.
    before = [view for view in views if view is not node and view < start]
    early += [view for view in before if any(user > start and user not in views for user in view.users)]
    if early:
        raise ConvertError(
            f"{planned.site.where} is read by {early[0].name} before {start.name} has filled it: fill it first, or "
            "leave this site out with ignore"
        )
    for writer in sorted(members | set(node.users)):
        written = {source for source, writes in shared(writer).items() if writes}
        if writer > start and not written.isdisjoint(members):
            raise ConvertError(
                f"{planned.site.where} is overwritten in place by {writer.name} ({writer.target}): use an "
                "out-of-place op in the model, or leave this site out with ignore"
            )


def erase_dead(node: Node) -> None:
    """Erase a node that nothing reads, and then what only it read; what writes in place stays."""
    stack, gone = [node], set[Node]()
    while stack:
        dead = stack.pop()
        if dead not in gone and not dead.users and dead.op == "call_function" and not any(shared(dead).values()):
            gone.add(dead)
            stack.extend(dead.all_input_nodes)
            dead.graph.erase_node(dead)
