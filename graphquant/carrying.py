"""From one program's caches to another's: what a prefill wrote, for a decode step to go on from."""

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from graphquant.errors import DataError
from graphquant.graph.writes import shared
from graphquant.loops import shapes_of
from graphquant.passes.lane_layouts import arranged, carries
from graphquant.records import SiteRecord, record_of

_ADVICE = "convert both programs with one calibration and config"


def carry_caches(source: nn.Module, target: nn.Module) -> None:
    """Copy the caches of one program's module into another's, ``[B, H, L, D]`` into lanes where the other has those.

    The modules are ``runnable`` of two programs with a static cache, converted from one calibration, or torch.compile's
    of them: one takes a text at once, the other a token a step.

    Raises:
        DataError: one is no such module, or their caches differ in name, dtype, size, or in what their codes mean.
    """
    first, second = _graph_module(source), _graph_module(target)
    held, wanted = _caches(first), _caches(second)
    if not wanted:
        raise DataError("the module to carry to writes to no buffer: capture with cache='static'")
    for name in dict.fromkeys([*wanted, *held]):
        _check(name, held.get(name), wanted.get(name))
    _check_codes(first, second)
    for name, cache in wanted.items():
        found = held[name]
        cache.copy_(found if found.shape == cache.shape else arranged(found, tuple(cache.shape)))


def _graph_module(module: object) -> GraphModule:
    """The program's module, also behind torch.compile's."""
    plain = getattr(module, "_orig_mod", module)
    if not isinstance(plain, GraphModule):
        raise DataError(f"expected runnable(program) or torch.compile's of it, and found a {type(plain).__name__}")
    return plain


def _caches(module: GraphModule) -> dict[str, Tensor]:
    """The buffers that a program's module writes to."""
    buffers = dict(module.named_buffers())
    written = [
        str(place.target)
        for node in module.graph.nodes
        for place, writes in shared(node).items()
        if writes and place.op == "get_attr"
    ]
    return {name: buffers[name] for name in dict.fromkeys(written)}


def _check(name: str, found: Tensor | None, wanted: Tensor | None) -> None:
    if found is None or wanted is None:
        has, lacks, cache = ("target", "source", wanted) if found is None else ("source", "target", found)
        assert cache is not None
        raise DataError(
            f"the {has} has a cache {shapes_of({name: cache})}, and the {lacks} has none: {_ADVICE}, "
            "from one model and cache='static'"
        )
    if found.data_ptr() == wanted.data_ptr():
        raise DataError(f"{name} of both is one tensor: take runnable(program), which has buffers of its own")
    if found.dtype != wanted.dtype or not (found.shape == wanted.shape or carries(found.shape, wanted.shape)):
        raise DataError(
            f"the cache {shapes_of({name: wanted})} cannot be filled from {shapes_of({name: found})}: {_ADVICE}, "
            "for the same rows and max_cache_len, and pass the one in lanes second"
        )


def _check_codes(source: GraphModule, target: GraphModule) -> None:
    """Refuse codes that mean something else in the target: another format, scale or zero point of a site."""
    theirs, ours = _stored(source), _stored(target)
    first, second = dict(source.named_buffers()), dict(target.named_buffers())
    for site in dict.fromkeys([*ours, *theirs]):
        found, expected = (
            kind[site].quantization_args.summary() if site in kind else "floats" for kind in (theirs, ours)
        )
        if found != expected:
            raise DataError(f"{site} is {found} in the source and {expected} in the target: {_ADVICE}")
        for part in ("scale", "zero_point"):
            before, after = (buffers.get(f"{site}_{part}") for buffers in (first, second))
            if before is not None and after is not None and not torch.equal(before, after):
                raise DataError(f"{site} has another {part} in the source than in the target: {_ADVICE}")


def _stored(module: GraphModule) -> dict[str, SiteRecord]:
    found = [record for node in module.graph.nodes if (record := record_of(node)) is not None]
    return {record.site: record for record in found if record.stored is not None}
