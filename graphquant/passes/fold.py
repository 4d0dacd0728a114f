"""``fold_scales``: scales of a stored cache move from its many values to the few numbers around them.

    softmax(Q · (s ∘ K)ᵀ) = softmax((s ∘ Q) · Kᵀ)          a scale of keys, of a tensor, head, channel or group, onto Q
    P · (s ∘ V) = s ∘ (P · V)                              one of values behind the product
    (s ∘ x) · Wᵀ = x · (W ∘ s)ᵀ                            and on into o_proj, where nothing sits between

Zero points are subtracted from the codes, which is exact in float32. What is left of a read is a cast of its integers.
A scale per token is part of no such sum, and stays.
"""

import sympy
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from graphquant.errors import ConvertError
from graphquant.graph import ops
from graphquant.graph.shapes import expression, static
from graphquant.numerics import expand_qparam
from graphquant.passes.editor import CallBuilder, ProgramEditor
from graphquant.passes.placing import erase_dead
from graphquant.passes.stored_reads import StoredCore, StoredRead, has_caches, stored_cores

aten = torch.ops.aten
_MOVES = ("alias", "reshape", "permute")


def fold_scales(
    program: ExportedProgram, *, keys: bool = True, values: bool = True, o_proj: bool = True
) -> ExportedProgram:
    """Fold the static scales of a stored cache, each kind where it is asked for; ``o_proj`` needs ``values``.

    Cores that repeat KV heads are left: ``pack_gqa`` first.

    Raises:
        ConvertError: the program stores no cache, or no core reads one in a way that can be folded.
    """
    if not has_caches(program):
        raise ConvertError("the program stores no cache: convert it with kv_cache='stored' first")
    editor = ProgramEditor(program, program.state_dict)
    cores = list(stored_cores(editor.graph))
    if not cores:
        raise ConvertError(
            "no attention reads a stored cache as states without repeating its heads: pack_gqa the program first (keys "
            "stored before rotary embedding cannot be folded, as they are rotated after they are read)"
        )
    with torch.no_grad():
        for core in cores:
            if keys and core.key is not None and _is_foldable(core.key):
                _fold_key(editor, core, core.key)
            if values and core.value is not None and _is_foldable(core.value):
                scaled = _fold_value(editor, core, core.value)
                if o_proj:
                    _into_projection(editor, scaled, core.value)
        return editor.finish()


def _is_foldable(read: StoredRead) -> bool:
    """Whether a static scale is still there, and nothing but the core reads the values."""
    return read.scale is not None and not read.args.dynamic and len(read.operand.users) == 1


def _unscaled(editor: ProgramEditor, read: StoredRead) -> Node:
    """The operand without its scale, which takes over its name's record."""
    node, dtype = read.shifted, read.operand.meta["val"].dtype
    if dtype != torch.float32:
        node = editor.after(read.operand)(aten._to_copy.default, node, dtype=dtype)
    node.meta["custom"] = read.operand.meta.pop("custom")
    return node


def _scaled(call: CallBuilder, x: Node, scale: Node) -> Node:
    """``x`` times a scale that broadcasts against it, in x's dtype."""
    dtype = x.meta["val"].dtype
    if dtype == torch.float32:
        return call(aten.mul.Tensor, x, scale)
    wide = call(aten._to_copy.default, x, dtype=torch.float32)
    return call(aten._to_copy.default, call(aten.mul.Tensor, wide, scale), dtype=dtype)


def _fold_key(editor: ProgramEditor, core: StoredCore, read: StoredRead) -> None:
    query, key, scale = core.node.args[0], core.node.args[1], read.scale
    assert isinstance(query, Node) and isinstance(key, Node) and scale is not None  # noqa: PT018 (for the type checker)
    call = editor.after(core.node.prev)
    core.node.update_arg(0, _scaled(call, query, scale))
    core.node.update_arg(1, _unscaled(editor, read))
    erase_dead(key)


def _fold_value(editor: ProgramEditor, core: StoredCore, read: StoredRead) -> Node:
    value, scale = core.node.args[2], read.scale
    assert isinstance(value, Node) and scale is not None  # noqa: PT018 (for the type checker)
    core.node.update_arg(2, _unscaled(editor, read))
    users = list(core.node.users)
    scaled = _scaled(editor.after(core.node), core.node, scale)
    for user in users:
        user.replace_input_with(core.node, scaled)
    erase_dead(value)
    return scaled


def _into_projection(editor: ProgramEditor, scaled: Node, read: StoredRead) -> None:
    """Move a scale of values on into the weight that multiplies them next, where only moves of data lie between."""
    if scaled.target is not aten.mul.Tensor:
        return  # half precision: the product would be rounded elsewhere
    between: list[Node] = []
    user = _only_user(scaled)
    while user is not None and ops.kind(user) in _MOVES:
        between.append(user)
        user = _only_user(user)
    if user is None or ops.kind(user) != "linear":
        return
    weight = ops.bound(user)["weight"]
    target = editor.program.graph_signature.inputs_to_parameters.get(weight.name)
    if target is None or len(weight.users) != 1:
        return
    old = editor.state_dict[target]
    if sum(value is old for value in editor.state_dict.values()) != 1:
        return  # a tied weight multiplies something else too
    columns = _moved(between, _spread(editor, read, scaled))
    editor.state_dict[target] = nn.Parameter((old.float() * columns).to(old.dtype), old.requires_grad)
    core = scaled.args[0]
    assert isinstance(core, Node)
    scaled.replace_all_uses_with(core)
    erase_dead(scaled)


def _only_user(node: Node) -> Node | None:
    users = [user for user in node.users if ops.kind(user) != "shape"]
    return users[0] if len(users) == 1 and users[0].op == "call_function" else None


def _spread(editor: ProgramEditor, read: StoredRead, scaled: Node) -> Tensor:
    """The scale at every place of the product with the values ``[B, Hkv, G·S, D]``, for one query where S is free."""
    layout, args = read.record.tensor_layout, read.args
    scale = expand_qparam(editor.state_dict[f"{read.record.site}_scale"], layout, args.strategy, args.group_size)
    batch, heads, rows, width = (static(size) for size in scaled.meta["val"].shape)
    if rows is None:
        rows = int(sympy.Poly(expression(scaled.meta["val"].shape[2])).LC())  # G of G·S
    assert heads is not None and width is not None  # noqa: PT018 (for the type checker)
    return scale.expand(batch or 1, heads, rows, width)


def _moved(between: list[Node], value: Tensor) -> Tensor:
    """The channels ``[Hq · D]`` that ``value`` becomes behind nodes that move data."""
    for node in between:
        args = map_arg(node.args[1:], lambda size: static(size.meta["val"]) or 1)
        value = node.target(value, *args, **node.kwargs)  # type: ignore[operator]
    return value.reshape(-1, value.shape[-1])[0]
