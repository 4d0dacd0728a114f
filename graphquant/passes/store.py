"""The KV cache stored as codes: quantized once when a token is written, dequantized when the whole is read.

What was   states → write into the cache → reader
becomes    site → codes → write into a cache of codes → values → (what lay between site and states) → reader

so that keys quantized before rotary embedding are rotated after they are read. A scale per token lies in a cache of its
own beside the codes.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from graphquant.errors import ConvertError
from graphquant.graph import AttentionSites, ops
from graphquant.graph.caches import Cache, find_caches, slots
from graphquant.graph.sites import LETTERS
from graphquant.passes.cache_safety import refuse_unsafe
from graphquant.passes.dialects import Qparams, Spread, emit_codes, emit_values, spread_qparams
from graphquant.passes.editor import CallBuilder, ProgramEditor
from graphquant.passes.placing import readers
from graphquant.passes.replay import Replay, cone
from graphquant.passes.slots import slot_positions
from graphquant.passes.storage import Storage
from graphquant.plan import PlannedSite, QuantizationPlan
from graphquant.records import cache_in_words, node_name

aten = torch.ops.aten


class Stored(NamedTuple):
    """What became of a site that is stored: its two nodes, and the cache in words."""

    quantize: Node
    dequantize: Node
    words: str


class StoragePlan(NamedTuple):
    """The cache of every site that is to be stored, by key, and the symbols of what is past in any cache."""

    caches: Mapping[str, Cache]
    pasts: frozenset[str]


NOTHING_STORED = StoragePlan({}, frozenset())


def plan_storage(program: ExportedProgram, sites: AttentionSites, plan: QuantizationPlan) -> StoragePlan:
    """Which planned sites the caches of the program hold: of each cache the one nearest to the core.

    Raises:
        ConvertError: the program has no cache, no planned site is in one, or a cache cannot hold codes.
    """
    caches = find_caches(program)
    if not caches:
        raise ConvertError(
            "kv_cache='stored' needs a program with a KV cache in it: capture the model with cache='static' and "
            "max_cache_len, or with cache='inputs'"
        )
    planned = {key: site.key for site in plan for key in site.keys}
    cores = {layer.core: layer for layer in sites.layers}
    found: dict[str, Cache] = {}
    for cache in caches:
        layer = cores.get(cache.core)
        roles = (f"{cache.operand}_states", f"{LETTERS[cache.operand]}_proj.output")
        held = [site.key for role in roles if layer is not None and (site := layer.site(role)) is not None]
        key = next((planned[key] for key in held if key in planned), None)
        if key in found:
            raise ConvertError(
                f"{key} is one tensor in two caches, {found[key].target} and {cache.target}: give each its own, or "
                "leave it out with ignore"
            )
        if key is not None:
            found[key] = cache
    if not found:
        raise ConvertError(
            f"kv_cache='stored' stores keys and values, and none of the {len(plan)} planned sites is one that a cache "
            "holds: quantize key_states and value_states, or the outputs of k_proj and v_proj"
        )
    refuse_unsafe(program, found)
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    pasts = {str(nodes[cache.place].meta["val"].shape[cache.dim]) for cache in caches if not cache.is_buffer}
    return StoragePlan(found, frozenset(pasts))


def store(
    editor: ProgramEditor, planned: PlannedSite, storing: StoragePlan, sites: AttentionSites, qparams: Qparams | None
) -> Stored:
    """Store one planned site in its cache."""
    cache = storing.caches[planned.key]
    x, write, states = (editor.nodes[name] for name in (planned.site.node, cache.write, cache.states))
    between, wanting = cone(ops.written(write), x), readers(x, planned, sites, editor.nodes)
    storage = Storage.of(
        planned.args, int(x.meta["val"].shape[-1]), is_buffer=cache.is_buffer, where=planned.site.where
    )
    prefix, call, dtype = node_name(planned.key), editor.after(x), x.meta["val"].dtype
    spread = spread_qparams(call, x, planned, qparams)
    parts = {"": storage.store(call, emit_codes(call, x, planned, spread), f"{prefix}_quantize")}
    if planned.args.dynamic:
        parts |= _token_parts(call, spread, storage)
    joined = _joined(editor, write, cache, planned, parts)
    later = editor.after(list(joined.values())[-1])
    whole = spread
    if planned.args.dynamic:
        zero_point = joined.get("_zero_point")
        floats = None if zero_point is None else later(aten._to_copy.default, zero_point, dtype=torch.float32)
        whole = Spread(joined["_scale"], floats)
    values = emit_values(later, storage.load(later, joined[""]), whole, dtype, f"{prefix}_dequantize")
    read = _replayed(later, values, (states, x), storing, planned, joined[""])
    _rewire(editor, write, read, list(joined.values()))
    _erase_dead([*between, write])
    left = [user for user in wanting if user in x.users and user not in call.made]
    if left:
        local = editor.after(parts[""])
        again = emit_values(local, storage.load(local, parts[""]), spread, dtype, f"{prefix}_dequantize_now")
        for user in left:
            user.replace_input_with(x, again)
    return Stored(parts[""], values, cache_in_words(cache.target, editor.nodes[cache.place].meta["val"]))


def _token_parts(call: CallBuilder, spread: Spread, storage: Storage) -> dict[str, Node]:
    """What a scale per token needs beside the codes."""
    parts = {"_scale": spread.scale}
    if spread.zero_point is not None:
        parts["_zero_point"] = call(aten._to_copy.default, spread.zero_point, dtype=storage.codes.storage)
    return parts


def _joined(
    editor: ProgramEditor, write: Node, cache: Cache, planned: PlannedSite, parts: dict[str, Node]
) -> dict[str, Node]:
    """Each part joined to what earlier tokens left of it, as the states were; the caches get their shapes."""
    old, dim = editor.nodes[cache.place], planned.layout.axes[0]
    before = old.meta["val"].shape
    call, joined, last = editor.after(write), {}, old
    for suffix, part in parts.items():
        now = part.meta["val"]
        shape = [before[0], *now.shape[1:]]
        shape[dim] = before[cache.dim]
        if not suffix:
            editor.retype(old, shape, now.dtype)
            editor.interface.move_dim(old.name, cache.dim, dim)
            for user in list(old.users):
                if ops.op_name(user) == "aten::sym_size" and user.args[1] == cache.dim:
                    user.args = (old, dim)
            place = old
        elif cache.is_buffer:
            empty = torch.zeros(tuple(int(size) for size in shape), dtype=now.dtype, device=now.device)
            place = editor.constant(f"{cache.target}{suffix}", empty, written=True)
        else:
            place = last = editor.further_input(old, last, shape, now.dtype, f"{cache.place}{suffix}")
        joined[suffix] = _written(call, write, place, part, dim)
    return joined


def _written(call: CallBuilder, write: Node, place: Node, part: Node, dim: int) -> Node:
    """The call of ``write`` on another cache and other values, along ``dim``."""
    if ops.kind(write) == "cat":
        return call(aten.cat.default, [place, part], dim)
    if "index" in ops.bound(write):
        return call(write.target, place, dim, slots(write), part)
    return call(write.target, place, [None] * dim + [slots(write)], part)


def _replayed(
    call: CallBuilder, values: Node, ends: tuple[Node, Node], storing: StoragePlan, planned: PlannedSite, joined: Node
) -> Node:
    """The states of the whole cache, as they follow from the values of the site."""
    states, x = ends
    if states is x:
        return values
    dim, cache = planned.layout.axes[0], storing.caches[planned.key]
    sequence, place = x.meta["val"].shape[dim], call.editor.nodes[cache.place]
    if isinstance(sequence, int):
        raise ConvertError(
            f"{planned.site.where} cannot be stored in a graph of {sequence} tokens a step: its states are computed "
            "after it is read, for all tokens. Convert the program with a dynamic sequence, then "
            "gq.specialize(program, sequence=1)"
        )
    total: Any = place.meta["val"].shape[dim] if cache.is_buffer else call(aten.sym_size.int, joined, dim)
    sizes = {str(sequence): total} | dict.fromkeys(storing.pasts, 0)
    positions = None
    if cache.is_buffer:
        positions = slot_positions(call.editor.nodes[cache.write], call.editor.user_inputs, total, planned.site.where)
    return Replay(call, total, sizes, positions, planned.site.where).run(states, x, values)


def _rewire(editor: ProgramEditor, write: Node, read: Node, joined: list[Node]) -> None:
    """Give the readers of the old cache the values, and the outputs of the program the codes."""
    for user in [user for user in write.users if user.op != "output"]:
        user.replace_input_with(write, read)
    output = next(user for user in reversed(editor.graph.nodes) if user.op == "output")
    results = output.args[0]
    assert isinstance(results, list | tuple)
    if write in results:
        given = [parts for result in results for parts in (joined if result is write else [result])]
        output.args = (tuple(given),)
        editor.interface.split_output(joined[0].name, [part.name for part in joined[1:]])


def _erase_dead(nodes: list[Node]) -> None:
    for node in sorted(nodes, reverse=True):
        if not node.users:
            node.graph.erase_node(node)
