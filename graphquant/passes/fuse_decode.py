"""``fuse_decode``: which cores of a program are put into lanes, and their caches in the new shape."""

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from graphquant.errors import ConvertError
from graphquant.graph import ops
from graphquant.graph.caches import INDEXED, slots
from graphquant.passes.editor import ProgramEditor
from graphquant.passes.lane_layouts import LANES, Shape, blocks, is_tiles, key_shape, value_shape
from graphquant.passes.lanes import int32_words, masked, output_of, scores_of
from graphquant.passes.placing import erase_dead
from graphquant.passes.stored_reads import StoredCore, StoredRead, stored_cores

aten = torch.ops.aten


def fuse_decode(program: ExportedProgram) -> ExportedProgram:
    """Say the attention of one token a step as lanes of integers; for graphs of one token, packed and folded before.

    Keys get the shape ``[B, H, L/32, W/4, 32, 4]``, W bytes a token, and values ``[B, H, W/64, L, 64]``, or other sizes
    where those divide nothing; logits change by rounding only.

    Raises:
        ConvertError: no core is one of a single token over 8- or 4-bit integer caches in buffers.
    """
    editor = ProgramEditor(program, program.state_dict)
    cores = [core for core in stored_cores(editor.graph) if _fits(core)]
    if not cores:
        raise ConvertError(
            "no attention reads keys and values of one token a step from integer caches in buffers: capture with "
            "cache='static' and sequence=1, convert with kv_cache='stored', pack_gqa and fold_scales, then fuse_decode"
        )
    with torch.no_grad():
        for core in cores:
            _fuse(editor, core)
        return editor.finish()


def _fits(core: StoredCore) -> bool:
    """Whether a core is one that lanes can say: integer caches of whole int32 words, of one token a step."""
    given, query = ops.bound(core.node), core.node.args[0]
    if core.key is None or core.value is None or not isinstance(query, Node):
        return False
    value = query.meta["val"]
    plain = not given["is_causal"] and not given["dropout_p"]
    return bool(plain and isinstance(value.shape[2], int) and _is_lanes(core.key) and _is_lanes(core.value))


def _is_lanes(read: StoredRead) -> bool:
    """Whether a cache in a buffer holds whole words of integers, one token is written, and no static scale is left."""
    write, value = read.loaded, read.loaded.meta["val"]
    if ops.op_name(write) not in INDEXED or value.dim() != 4 or value.shape[-1] % LANES:
        return False
    one = bool(_node(write.args[-1]).meta["val"].shape[2] == 1)
    return one and read.args.type != "float" and (read.scale is None or bool(read.args.dynamic))


def _node(argument: object) -> Node:
    assert isinstance(argument, Node)
    return argument


def _fuse(editor: ProgramEditor, core: StoredCore) -> None:
    key, value, bound = core.key, core.value, ops.bound(core.node)
    assert key is not None
    assert value is not None
    query, dtype = _node(bound["query"]), core.node.meta["val"].dtype
    keys, values = _keys(editor, key), _values(editor, value)
    call = editor.after(core.node.prev)
    scale = query.meta["val"].shape[-1] ** -0.5 if bound["scale"] is None else bound["scale"]
    wide = query if dtype == torch.float32 else call(aten._to_copy.default, query, dtype=torch.float32)
    scores = scores_of(call, call(aten.mul.Tensor, wide, scale), keys, key)
    if bound["attn_mask"] is not None:
        scores = masked(call, scores, bound["attn_mask"])
    top = call(aten.amax.default, scores, [-1], True)
    weights = call(aten.exp.default, call(aten.sub.Tensor, scores, top))
    out = output_of(call, weights, call(aten.sum.dim_IntList, weights, [-1], True), values, value)
    if dtype != torch.float32:
        out = call(aten._to_copy.default, out, dtype=dtype)
    # The records go to the nodes that read now: the report shows them still.
    keys.meta["custom"], values.meta["custom"] = key.operand.meta["custom"], value.operand.meta["custom"]
    core.node.replace_all_uses_with(out)
    erase_dead(core.node)
    for read in (key, value):
        editor.graph.erase_node(read.loaded)  # a write, which nothing reads any more


def _keys(editor: ProgramEditor, read: StoredRead) -> Node:
    """The cache of keys in its new shape, written that way, as int32 words ``[B, H, N, W/4, T]``."""
    return _in_tiles(editor, read, key_shape(_shape(read)))


def _values(editor: ProgramEditor, read: StoredRead) -> Node:
    """The cache of values in its new shape, written that way, as int32 words: tiles, or ``[B, H, M, N, T, 16]``."""
    shape = value_shape(_shape(read))
    if is_tiles(shape):
        return _in_tiles(editor, read, shape)
    write = read.loaded
    place, written = _node(write.args[0]), _node(write.args[-1])
    batch, heads, chunks, length, width = shape
    editor.retype(place, shape, place.meta["val"].dtype)
    call = editor.after(write)
    split = call(aten.reshape.default, written, [batch, heads, chunks, 1, width])
    words = int32_words(call, call(aten.index_copy_.default, place, 3, slots(write), split))
    count = blocks(length)
    return call(aten.view.default, words, [batch, heads, chunks, count, length // count, width // LANES])


def _in_tiles(editor: ProgramEditor, read: StoredRead, shape: Shape) -> Node:
    """A cache in tiles ``[B, H, N, W/4, T, 4]``, as int32 words."""
    write = read.loaded
    place, written, index = _node(write.args[0]), _node(write.args[-1]), slots(write)
    batch, heads, _, words, tokens, _ = shape
    editor.retype(place, shape, place.meta["val"].dtype)
    call = editor.after(write)
    split = call(aten.reshape.default, written, [1, batch, heads, words, LANES])
    tile = call(aten.div.Tensor_mode, index, tokens, rounding_mode="floor")
    slot = call(aten.remainder.Scalar, index, tokens)
    joined = call(aten.index_put_.default, place, [None, None, tile, None, slot], split)
    return call(aten.squeeze.dim, int32_words(call, joined), -1)


def _shape(read: StoredRead) -> Shape:
    return tuple(int(size) for size in _node(read.loaded.args[0]).meta["val"].shape)
