"""``pack_gqa``: the query heads that share a KV head become rows of one attention, and K and V are never expanded.

Dims: B batch, Hq query heads, Hkv KV heads, G = Hq / Hkv, S queries, L keys, D head_dim, Dv that of the values. Query
s of head ``G·kv + g`` is row ``S·g + s`` of KV head kv: ``[B, Hq, S, D]`` and ``[B, Hkv, G·S, D]`` are reshapes of each
other, and the rows of the mask are repeated G times.
"""

import math
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from graphquant.errors import ConvertError
from graphquant.graph import ops
from graphquant.graph.core import Core, find_cores, hidden_cores
from graphquant.graph.layout_walk import Labels, Place, states_layout, states_place, step, walk
from graphquant.graph.shapes import same, same_shape, shape, show, static
from graphquant.graph.writes import family, shared
from graphquant.passes.editor import CallBuilder, ProgramEditor

_aten = torch.ops.aten
_SDPA = _aten.scaled_dot_product_attention.default
_STATES: Labels = ("B", "H", "S", "D")
_Masks = dict[tuple[Node, int, int], Node]
_MOVES = ("alias", "permute", "reshape", "slice", "squeeze", "unsqueeze", "expand", "repeat", "repeat_interleave")


@dataclass(frozen=True)
class _States:
    """K or V before its heads were repeated: its dims, and the calls between, from the core backwards."""

    node: Node
    labels: Labels
    crossed: tuple[Node, ...] = ()

    @property
    def heads(self) -> int | None:
        return static(shape(self.node)[self.labels.index("H")])


@dataclass(frozen=True)
class _Grouped:
    """A grouped core with its K and V ``[B, Hkv, L, D]`` in any order of dims, Hkv and G."""

    core: Node
    key: _States
    value: _States
    heads: int
    groups: int


def pack_gqa(program: ExportedProgram) -> ExportedProgram:
    """Pack every grouped sdpa core; one that cannot be packed, and a program without any, stay as they were.

    Pack last, after ``convert``: of a packed core the finder sees no more than Hkv heads of queries.

    Raises:
        ConvertError: there is grouped attention, and none of it can be packed.
    """
    editor = ProgramEditor(program, program.state_dict)
    inputs = frozenset(name for name in program.graph_signature.user_inputs if isinstance(name, str))
    found: list[_Grouped] = []
    left: list[ConvertError] = []
    for core in find_cores(editor.graph, inputs):
        try:
            found += [match] if isinstance(core, Core) and (match := _match(core)) else []
        except ConvertError as error:
            left.append(error)
    if found:
        # With gradients on, torch would choose another kernel for the fake values than it did in the capture.
        with torch.no_grad():
            return _packed(editor, found)
    if left:
        raise left[0]
    for caller, anchor in hidden_cores(program.graph_module, inputs):
        cores = (core for core in find_cores(anchor.graph, inputs) if core.anchor is anchor)
        if any(isinstance(core, Core) and _is_grouped(core) for core in cores):
            raise _refusal(anchor, f"it is in the subgraph of {caller.name}: capture the model without autocast in it")
    return program


def _refusal(core: Node, why: str) -> ConvertError:
    line = ops.source_line(core) or "no source line"
    return ConvertError(f"grouped attention {core.name} ({line}) cannot be packed: {why}")


def _match(core: Core) -> _Grouped | None:
    """How a core is packed; None where every query head has a KV head of its own, as far as can be seen."""
    node, operands, how = core.anchor, (core.query, core.key, core.value), ops.op_name(core.anchor)
    why = f"it is spelled as {how} of {len(shape(node))} dims: capture the model with attn_implementation='sdpa'"
    if node.target is _SDPA and all(len(shape(operand.node)) == 4 for operand in operands):
        heads = static(shape(core.query.node)[1])
        key, value = (_before_repeat(operand.node, node) for operand in operands[1:])
        if heads and key.heads and value.heads and min(key.heads, value.heads) < heads:
            return _checked(_Grouped(node, key, value, key.heads, heads // key.heads))
        why = "how its KV heads were repeated is not understood"
    if _is_grouped(core):
        raise _refusal(node, why)
    return None


def _is_grouped(core: Core) -> bool:
    """Whether the finder, which sees through more than can be undone here, sees fewer heads of keys than of queries."""
    walks = [walk(operand.node, operand.labels) for operand in (core.query, core.key)]
    places = [None if stop.refused else states_place(way) for way, stop in walks]
    query, key = (None if place is None else states_layout(place) for place in places)
    return query is not None and key is not None and key.heads < query.heads


def _before_repeat(operand: Node, core: Node) -> _States:
    """K or V ``[B, H, L, D]`` as it was before every op that repeats its heads."""
    place, found, copied = Place(operand, _STATES), _States(operand, _STATES), False
    crossed: list[Node] = []
    while _only_moves(place.node) and isinstance(back := step(place.node, place.labels), Place):
        crossed.append(place.node)
        if back.crossed == "repeat":
            if not _side_by_side(place, back):
                raise _refusal(core, f"{place.node.name} does not put the copies of a KV head side by side")
            copied = True
        if copied and sorted(back.labels) == sorted(_STATES):
            found, copied = _States(back.node, back.labels, tuple(crossed)), False
        place = back
    if copied:
        raise _refusal(core, f"which heads are repeated behind {place.node.name} is not understood")
    return found


def _only_moves(node: Node) -> bool:
    """Whether every value of a node's result is one of its input, in the same dtype."""
    kind = ops.kind(node)
    if kind == "cast":
        return bool(ops.first_input(node).meta["val"].dtype == node.meta["val"].dtype)
    return kind in _MOVES and not (kind == "alias" and ops.bound(node).get("train"))  # a dropout


def _side_by_side(place: Place, source: Place) -> bool:
    """Whether a repeat puts the copies of a head one after another, as the query heads are that read it."""
    before, after = shape(source.node), shape(place.node)
    grown = [dim for dim in range(len(after)) if not same(before[dim], after[dim])]
    if "N" in place.labels and any(place.labels[dim] == "H" for dim in grown):
        return False  # [B, copies, heads, L, D]: all the heads, again and again
    each = ops.kind(place.node) == "repeat_interleave" and isinstance(ops.bound(place.node)["repeats"], int)
    return each or all(static(before[dim]) == 1 for dim in grown)


def _checked(match: _Grouped) -> _Grouped:
    """The match, where it would compute the same once it is packed."""
    core, args = match.core, ops.bound(match.core)
    query, mask = shape(args["query"]), args["attn_mask"]
    if match.value.heads != match.heads:
        raise _refusal(core, f"it has {match.heads} heads of keys and {match.value.heads} of values")
    if args["dropout_p"] != 0:
        raise _refusal(core, f"it drops values out (dropout_p={args['dropout_p']}): call model.eval() before capture")
    if None in (static(query[3]), static(shape(core)[3])):
        raise _refusal(core, f"its head_dim is no constant: {show(query)} to {show(shape(core))}")
    for states in (match.key, match.value):
        read = states.crossed[-1] if states.crossed else core
        writers = [writer for node in (states.node, *states.crossed) for writer in _writers(node)]
        late = [writer for writer in writers if read < writer < core]
        if late:
            raise _refusal(core, f"{late[0].name} overwrites {states.node.name} or its copies after they were made")
    if mask is not None:
        heads, rows = (1, *shape(mask))[-3:-1]
        fits = static(heads) in (1, query[1]) and (static(rows) == 1 or same(rows, query[2]))
        if args["is_causal"] or not fits:
            raise _refusal(core, f"queries {show(query)}, mask {show(shape(mask))}, is_causal={args['is_causal']}")
    return match


def _writers(node: Node) -> list[Node]:
    """The calls that write in place to a tensor, or to what it is a view of."""
    while sources := shared(node):
        node = next(iter(sources))
    members = family(node)
    users = members.union(*(member.users for member in members))
    return [user for user in users if any(writes and source in members for source, writes in shared(user).items())]


def _packed(editor: ProgramEditor, found: list[_Grouped]) -> ExportedProgram:
    """The program with these cores packed, and without what nothing reads any more."""
    crossed = {node for match in found for states in (match.key, match.value) for node in states.crossed}
    checks = {user for node in crossed for user in node.users if ops.op_name(user) == "aten::_assert_tensor_metadata"}
    kept = {node for node in editor.graph.nodes if not node.users} - checks
    masks: _Masks = {}
    for match in found:
        match.core.replace_all_uses_with(_pack(editor, match, masks))
        editor.graph.erase_node(match.core)
    editor.graph.eliminate_dead_code(lambda node: node in kept or (node.is_impure() and node not in checks))
    return editor.finish()


def _pack(editor: ProgramEditor, match: _Grouped, masks: _Masks) -> Node:
    """The result ``[B, Hq, S, Dv]`` of a core's packed form; ``masks`` are those that were packed before."""
    args, call, kv_heads = ops.bound(match.core), editor.after(match.core), match.heads
    query, width, wide = args["query"], int(shape(args["query"])[3]), int(shape(match.core)[3])
    length, heads = _size(call, query, 2), kv_heads * match.groups
    packed = call(_aten.reshape.default, query, [_size(call, query, 0), kv_heads, -1, width])
    key, value = (
        kv.node if kv.labels == _STATES else call(_aten.permute.default, kv.node, [*map(kv.labels.index, _STATES)])
        for kv in (match.key, match.value)
    )
    mask = _mask(editor, call, match, length, masks)
    scale = 1 / math.sqrt(width) if args["scale"] is None else args["scale"]
    rows = call(_SDPA, packed, key, value, *([] if mask is None else [mask]), scale=scale)
    batch = _size(call, rows, 0)
    if not same_shape(match.core.meta["val"].stride()[1:3], (wide, heads * wide)):
        return call(_aten.reshape.default, _copied(call, rows), [batch, heads, length, wide])
    # [B, S, Hq, Dv] in memory, as torch's fused kernels leave it: what follows may be a view that needs that.
    split = call(_aten.reshape.default, rows, [batch, kv_heads, match.groups, length, wide])
    moved = call(_aten.permute.default, split, [0, 3, 1, 2, 4])
    joined = call(_aten.reshape.default, _copied(call, moved), [batch, length, heads, wide])
    return call(_aten.transpose.int, joined, 1, 2)


def _copied(call: CallBuilder, node: Node) -> Node:
    """A copy whose heads can be merged in a view, whatever strides a compiler's own attention leaves."""
    return call(_aten.clone.default, node, memory_format=torch.contiguous_format)


def _size(call: CallBuilder, node: Node, dim: int) -> int | Node:
    known = static(shape(node)[dim])
    return call(_aten.sym_size.int, node, dim) if known is None else known


def _mask(editor: ProgramEditor, call: CallBuilder, match: _Grouped, length: int | Node, masks: _Masks) -> Node | None:
    """The mask of G·S rows; one that many cores read is packed once, behind it, where nothing can overwrite it."""
    args = ops.bound(match.core)
    mask: Node | None = args["attn_mask"]
    if args["is_causal"]:
        device = {"device": args["query"].meta["val"].device, "pin_memory": False}
        keys = call(_aten.arange.default, _size(call, match.key.node, match.key.labels.index("S")), **device)
        queries = call(_aten.unsqueeze.default, call(_aten.arange.default, length, **device), 1)
        return _repeated(call, call(_aten.le.Tensor, keys, queries), match, -1)
    if mask is None or all(static(dim) == 1 for dim in (1, *shape(mask))[-3:-1]):
        return mask
    rows = length if static(shape(mask)[-2]) == 1 else -1
    if isinstance(rows, Node) or "nn_module_stack" not in mask.meta or _writers(mask):
        return _repeated(call, mask, match, rows)
    key = (mask, match.heads, match.groups)
    if key not in masks:
        masks[key] = _repeated(editor.after(mask), mask, match, rows)
    return masks[key]


def _repeated(call: CallBuilder, mask: Node, match: _Grouped, rows: int | Node) -> Node:
    """A mask ``[B, 1 or Hq, S or 1, L]``, B and heads there or not, as ``[B, 1 or Hkv, G·S, L]``."""
    rank = len(shape(mask))
    mask = call(_aten.unsqueeze.default, mask, 0) if rank == 2 else mask
    front, per_head = [_size(call, mask, 0)] if rank == 4 else [], static(shape(mask)[-3]) != 1
    wanted = [*(-1 for _ in front), -1 if per_head else match.groups, rows, -1]
    mask = mask if set(wanted) == {-1} else call(_aten.expand.default, mask, wanted)
    heads = [] if rank == 2 else [match.heads if per_head else 1]
    return call(_aten.reshape.default, mask, [*front, *heads, -1, _size(call, mask, max(rank, 3) - 1)])
