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
from graphquant.records import RECORD, cache_in_words

aten = torch.ops.aten


def fuse_decode(program: ExportedProgram) -> ExportedProgram:
    """Say the attention of one token a step as lanes of integers; for graphs of one token, packed and folded before.

    Keys get the shape ``[B, H, L/32, W/4, 32, 4]``, W bytes a token, and values ``[B, H, W/64, L, 64]``, or other sizes
    where those divide nothing; logits change by rounding only. An attention over a cache of floats stays as it was.

    Raises:
        ConvertError: no attention reads a stored cache of states, or one does which lanes do not take.
    """
    editor = ProgramEditor(program, program.state_dict)
    cores = list(stored_cores(editor.graph))
    if not cores:
        raise ConvertError(
            "no attention reads keys and values from a cache of codes without repeating its heads: capture with "
            "cache='static' and sequence=1, convert states with kv_cache='stored', pack_gqa and fold_scales, then "
            "fuse_decode; keys stored before rotary embedding have no lanes"
        )
    for core in cores:
        reason = _misfit(core)
        if reason is not None:
            raise ConvertError(f"lanes do not take the attention {core.node.name}: {reason}")
    with torch.no_grad():
        for core in cores:
            _fuse(editor, core)
        return editor.finish()


def _misfit(core: StoredCore) -> str | None:
    """Why a core is none that lanes can say: expected are integer caches of whole int32 words, of one token a step."""
    given, query = ops.bound(core.node), core.node.args[0]
    if core.key is None or core.value is None:
        stored, part = core.key or core.value, "values" if core.key else "keys"
        assert stored is not None
        before = "what is stored before rotary embedding is not"
        return f"beside {stored.record.site} its {part} are not stored as states ({before}): store both so"
    if given["is_causal"] or given["dropout_p"]:
        return "it is causal or has dropout, and one token a step has neither"
    if not isinstance(query, Node) or not isinstance(query.meta["val"].shape[2], int):
        return _ONE_TOKEN
    return _misfit_read(core.key) or _misfit_read(core.value)


def _misfit_read(read: StoredRead) -> str | None:
    write, value, site = read.loaded, read.loaded.meta["val"], read.record.site
    if read.args.type == "float":
        return f"{site} is fp8; expected integers"
    if ops.op_name(write) not in INDEXED or value.dim() != 4:
        return f"the cache of {site} is no buffer [B, H, L, D]: capture with cache='static'"
    if ops.written(write).meta["val"].shape[2] != 1:
        return _ONE_TOKEN
    if value.shape[-1] % LANES:
        return f"{site} has {value.shape[-1]} bytes a token and head in its cache; expected a multiple of {LANES}"
    if read.scale is not None and not read.args.dynamic:
        return f"{site} has a scale that is not folded: fold_scales first"
    return None


_ONE_TOKEN = "it takes more than one token a step: specialize(program, sequence=1) first"


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
    # Where the mask hides all tokens of a row, sdpa gives zeros: -inf less -inf, and 0 by 0, would be NaN.
    top = call(aten.clamp_min.default, call(aten.amax.default, scores, [-1], True), torch.finfo(torch.float32).min)
    weights = call(aten.exp.default, call(aten.sub.Tensor, scores, top))
    out = output_of(call, weights, values, value)
    if dtype != torch.float32:
        out = call(aten._to_copy.default, out, dtype=dtype)
    for read, words in ((key, keys), (value, values)):
        _retell(editor, read, words)
    core.node.replace_all_uses_with(out)
    erase_dead(core.node)
    for read in (key, value):
        editor.graph.erase_node(read.loaded)  # a write, which nothing reads any more


def _retell(editor: ProgramEditor, read: StoredRead, words: Node) -> None:
    """Put a site's record, which the report shows, on the node that reads its cache now, with the cache's new shape."""
    place = _node(read.loaded.args[0])
    stored = cache_in_words(str(editor.interface.buffer_of(place.name)), place.meta["val"])
    words.meta["custom"] = {RECORD: {**read.operand.meta["custom"][RECORD], "stored": stored}}


def _keys(editor: ProgramEditor, read: StoredRead) -> Node:
    """The cache of keys in its new shape, written that way, as int32 words ``[B, H, N, W/4, T]``."""
    return _in_tiles(editor, read, key_shape(_shape(read)))


def _values(editor: ProgramEditor, read: StoredRead) -> Node:
    """The cache of values in its new shape, written that way, as int32 words: tiles, or ``[B, H, M, N, T, 16]``."""
    shape = value_shape(_shape(read))
    if is_tiles(shape):
        return _in_tiles(editor, read, shape)
    write = read.loaded
    place, written = _node(write.args[0]), ops.written(write)
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
    place, written, index = _node(write.args[0]), ops.written(write), slots(write)
    batch, heads, _, words, tokens, _ = shape
    editor.retype(place, shape, place.meta["val"].dtype)
    call = editor.after(write)
    split = call(aten.reshape.default, written, [1, batch, heads, words, LANES])
    tile = call(aten.div.Tensor_mode, index, tokens, rounding_mode="floor")
    # One before the first tile would be the last.
    tile = call(aten.masked_fill.Scalar, tile, call(aten.lt.Scalar, index, 0), shape[2])
    slot = call(aten.remainder.Scalar, index, tokens)
    joined = call(aten.index_put_.default, place, [None, None, tile, None, slot], split)
    return call(aten.squeeze.dim, int32_words(call, joined), -1)


def _shape(read: StoredRead) -> Shape:
    return tuple(int(size) for size in _node(read.loaded.args[0]).meta["val"].shape)
