"""Walk back from an operand of the attention core through ops that only move data, keeping track of its dims.

A dim carries a label: B batch, H heads, N copies of a KV head, S sequence, P copies of a position, D head_dim, and BH
for batch and heads merged. Each step maps the labels of an output to those of its input, so ``repeat_kv``, ``bmm``'s
merged batch and a transposed key are all followed by the same few rules:

    [B, H, S, D] ←reshape← [B, H, N, S, D] ←expand, unsqueeze← [B, H, S, D]        repeat_kv
    [BH, S, D]   ←reshape← [B, H, S, D]                                           bmm of a decomposed graph
"""

from dataclasses import dataclass

import torch
from torch.fx import Node

from graphquant.graph import ops
from graphquant.graph.shapes import same, same_shape, segments, shape, show, static
from graphquant.numerics import TensorLayout
from graphquant.numerics.strategies import LayoutKind

Labels = tuple[str, ...]
STATES_KINDS: dict[Labels, LayoutKind] = {("B", "H", "S", "D"): "states", ("B", "S", "H", "D"): "states_bshd"}


@dataclass(frozen=True)
class Place:
    """A node on the way, the labels of its dims, and what the step that led here undid.

    ``crossed`` is "layout", "alias" (same values, same dims), "repeat" (copies of a KV head), "cache" (a write of the
    states into a cache) or "scale" (a factor of the softmax scale).
    """

    node: Node
    labels: Labels
    crossed: str = "layout"


@dataclass(frozen=True)
class Stop:
    """Where a walk ended, and why; ``refused`` where what was crossed on the way cannot be KV heads after all."""

    node: Node
    reason: str
    refused: bool = False


def walk(node: Node, labels: Labels) -> tuple[list[Place], Stop]:
    """All places from ``node`` back to the first op that computes something, nearest first."""
    places = [Place(node, labels)]
    while True:
        place = step(places[-1].node, places[-1].labels)
        if isinstance(place, Stop):
            return places, place
        places.append(place)


def step(node: Node, labels: Labels) -> Place | Stop:
    """One step back from a node, or why there is none."""
    kind = ops.kind(node)
    rule = _RULES.get(kind)
    if rule is None:
        what = "is an input or a weight" if kind == "input" else f"({ops.op_name(node)}) computes new values"
        return Stop(node, f"{node.name} {what}")
    return rule(node, labels)


def _alias(node: Node, labels: Labels) -> Place | Stop:
    return Place(ops.first_input(node), labels, "alias")


def _cast(node: Node, labels: Labels) -> Place | Stop:
    source = ops.first_input(node)
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    exact = torch.promote_types(before, after) == after  # a core in float32 reads states in the model's dtype
    return Place(source, labels, "alias" if exact else "layout")


def _permute(node: Node, labels: Labels) -> Place | Stop:
    order = ops.permutation(node, len(labels))
    moved = dict(zip(order, labels, strict=True))
    return Place(ops.first_input(node), tuple(moved[dim] for dim in range(len(labels))))


def _unsqueeze(node: Node, labels: Labels) -> Place | Stop:
    dim = ops.bound(node)["dim"] % len(labels)
    return Place(ops.first_input(node), labels[:dim] + labels[dim + 1 :])


def _squeeze(node: Node, labels: Labels) -> Place | Stop:
    dims = shape(ops.first_input(node))
    given = ops.bound(node).get("dim")
    chosen = range(len(dims)) if given is None else given if isinstance(given, list | tuple) else [given]
    gone = {dim % len(dims) for dim in chosen if static(dims[dim]) == 1}
    rest = iter(labels)
    return Place(ops.first_input(node), tuple("1" if dim in gone else next(rest) for dim in range(len(dims))))


def _expand(node: Node, labels: Labels) -> Place | Stop:
    source = ops.first_input(node)
    dims, wanted = shape(source), shape(node)
    if len(dims) != len(wanted):
        return Stop(node, f"{node.name} expands {show(dims)} to the further dims of {show(wanted)}")
    return _copies(node, labels, [not same(old, new) for old, new in zip(dims, wanted, strict=True)])


def _copies(node: Node, labels: Labels, grown: list[bool]) -> Place | Stop:
    """The source of copies along the dims that have ``grown``, which must be heads."""
    along = [label for label, more in zip(labels, grown, strict=True) if more]
    if set(along) <= {"N", "H"}:
        return Place(ops.first_input(node), labels, "repeat" if along else "alias")
    refused = not {"S", "P"}.isdisjoint(along)
    names = ", ".join("S" if label == "P" else label for label in along)
    return Stop(node, f"{node.name} copies along {names}; expected copies of KV heads only", refused)


def _repeat(node: Node, labels: Labels) -> Place | Stop:
    repeats = list(ops.bound(node).values())[1]  # "repeats" of repeat, "dims" of tile
    if len(repeats) != len(shape(ops.first_input(node))):
        return Stop(node, f"{node.name} repeats {show(shape(ops.first_input(node)))} along further dims")
    return _copies(node, labels, [times != 1 for times in repeats])


def _reshape(node: Node, labels: Labels) -> Place | Stop:
    source = ops.first_input(node)
    dims, wanted = shape(source), shape(node)
    if same_shape(dims, wanted):
        return Place(source, labels, "alias")
    front = _MERGED_FRONTS.get(len(dims), ())
    if labels[0] == "BH" and front and same_shape(dims[len(front) :], wanted[1:]):
        return Place(source, (*front, *labels[1:]))  # asked first: with one head, segments cannot tell whose the 1 is
    parts = segments(wanted, dims)
    if parts is None:
        return Stop(node, f"{node.name} reshapes {show(dims)} to {show(wanted)}, whose dims do not line up")
    found: dict[int, str] = {}
    for mine, theirs in parts:
        out = tuple(labels[i] for i in mine if labels[i] != "1") or ("1",)
        if len(out) == len(theirs) == 1:
            found[theirs[0]] = out[0]
            continue
        split = _SPLITS.get((out, len(theirs)))
        if split is None:
            return Stop(
                node, f"{node.name} reshapes {show(dims)} to {show(wanted)}: {'·'.join(out)} is not a merge of heads"
            )
        found.update(zip(theirs, split, strict=True))
    # Dims of size 1 that no part claimed were dropped or inserted by the reshape.
    return Place(source, tuple(found.get(dim, "1") for dim in range(len(dims))))


_MERGED_FRONTS: dict[int, Labels] = {4: ("B", "H"), 5: ("B", "H", "N")}
_SPLITS: dict[tuple[Labels, int], Labels] = {
    (("H",), 2): ("H", "N"),
    (("S",), 2): ("S", "P"),
    (("BH",), 2): ("B", "H"),
    (("B", "H"), 1): ("BH",),
    (("H", "N"), 1): ("H",),
    (("B", "H"), 3): ("B", "H", "N"),
}


def _slice(node: Node, labels: Labels) -> Place | Stop:
    args = ops.bound(node)
    if same_shape(shape(ops.first_input(node)), shape(node)):
        return Place(ops.first_input(node), labels, "alias")
    label = labels[args["dim"] % len(labels)]
    return Stop(node, f"{node.name} takes a part of dim {label}")


def _repeat_interleave(node: Node, labels: Labels) -> Place | Stop:
    dim = ops.bound(node).get("dim")
    if dim is None:
        return Stop(node, f"{node.name} repeats the flattened tensor")
    return _copies(node, labels, [place == dim % len(labels) for place in range(len(labels))])


def _cat(node: Node, labels: Labels) -> Place | Stop:
    args = ops.bound(node)
    label = labels[args["dim"] % len(labels)]
    parts = args["tensors"]
    if label != "S" or len(parts) != 2 or not _stored(parts[0]):
        return Stop(node, f"{node.name} joins {len(parts)} tensors along {label}; expected past and present along S")
    return Place(parts[1], labels, "cache")


def _write(node: Node, labels: Labels) -> Place | Stop:
    states = _whole(ops.written(node), len(labels))
    if not _stored(ops.first_input(node)) or len(shape(states)) != len(labels):
        return Stop(node, f"{node.name} writes into a tensor that is no cache")
    return Place(states, labels, "cache")


def _whole(states: Node, dims: int) -> Node:
    """States as they were before dims of size 1 were left out in front, as torch does in ``cache[:, :, slots] = x``."""
    source = ops.first_input(states) if ops.kind(states) in ("reshape", "squeeze") else states
    before, after = shape(source), shape(states)
    left = len(before) - len(after)
    whole = len(before) == dims and all(size == 1 for size in before[:left]) and same_shape(before[left:], after)
    return source if whole else states


def _stored(node: Node) -> bool:
    """Whether a node is an input or buffer, seen through ops that only move data."""
    while ops.kind(node) in ("alias", "cast", "slice", "expand", "reshape", "permute", "getitem"):
        node = ops.first_input(node)
    return ops.kind(node) == "input"


def _scale(node: Node, labels: Labels) -> Place | Stop:
    if len(ops.tensor_inputs(node)) != 1:
        return Stop(node, f"{node.name} ({ops.op_name(node)}) multiplies two tensors")
    return Place(ops.first_input(node), labels, "scale")


_RULES = {
    "alias": _alias,
    "cast": _cast,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "reshape": _reshape,
    "slice": _slice,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "cat": _cat,
    "write": _write,
    "scale": _scale,
}


def states_place(places: list[Place]) -> Place | None:
    """The place whose tensor a cache would store: ``[B, H, S, D]`` (or ``[B, S, H, D]``, where an einsum reads it
    so), before repeat_kv, cache write and scale.

    Of the places after the last such crossing, the one nearest to the core; of several names for one tensor, the one
    that computed it.
    """
    start = max((i for i, place in enumerate(places) if place.crossed in ("repeat", "cache", "scale")), default=0)
    for index in range(start, len(places)):
        if places[index].labels in STATES_KINDS and states_layout(places[index]) is not None:
            while index + 1 < len(places) and places[index + 1].crossed == "alias":
                index += 1
            return places[index]
    return None


def states_layout(place: Place) -> TensorLayout | None:
    """The layout of a place that holds states; None where its heads or channels are no constants."""
    dims = dict(zip(place.labels, shape(place.node), strict=True))
    heads, head_dim = static(dims["H"]), static(dims["D"])
    return None if heads is None or head_dim is None else TensorLayout(STATES_KINDS[place.labels], heads, head_dim)
