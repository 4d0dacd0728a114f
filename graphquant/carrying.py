"""From one program's caches to another's: what a prefill wrote, for a decode step to go on from."""

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from graphquant.errors import DataError
from graphquant.graph import ops
from graphquant.passes.lane_layouts import arranged, carries


def carry_caches(source: nn.Module, target: nn.Module) -> None:
    """Copy the caches of one program's module into another's, ``[B, H, L, D]`` into lanes where the other has those.

    The modules are ``program.module()`` of two programs with a static cache, converted from one calibration, or
    torch.compile's of them: one takes a text at once, the other a token a step.

    Raises:
        DataError: the target writes to no buffer, or the source has none of that name, dtype and size.
    """
    held = dict(_plain(source).named_buffers())
    wanted = _written(_plain(target))
    if not wanted:
        raise DataError(f"the {type(target).__name__} to carry to writes to no buffer: capture with cache='static'")
    for name, cache in wanted.items():
        _check(name, held.get(name), cache)
    for name, cache in wanted.items():
        found = held[name]
        cache.copy_(found if found.shape == cache.shape else arranged(found, tuple(cache.shape)))


def _plain(module: nn.Module) -> nn.Module:
    """The module behind torch.compile's."""
    plain = getattr(module, "_orig_mod", module)
    assert isinstance(plain, nn.Module)
    return plain


def _written(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a program's module writes to."""
    if not isinstance(module, GraphModule):
        raise DataError(f"expected program.module(), and found a {type(module).__name__}")
    buffers = dict(module.named_buffers())
    found = [_first(node) for node in module.graph.nodes if _in_place(node)]
    return {name: buffers[name] for name in dict.fromkeys(found) if name in buffers}


def _in_place(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    first = schema.arguments[0] if schema is not None and schema.arguments else None
    return first is not None and first.alias_info is not None and first.alias_info.is_write


def _first(node: Node) -> str:
    """The name of the buffer that a call writes to, or of whatever else that is."""
    while node.op == "call_function":
        node = ops.first_input(node)
    return str(node.target)


def _check(name: str, found: Tensor | None, wanted: Tensor) -> None:
    said = f"{name} {str(wanted.dtype).removeprefix('torch.')} {list(wanted.shape)}"
    if found is None:
        raise DataError(f"the source has no cache {said}: capture both with the same model and cache='static'")
    if found.dtype != wanted.dtype or not (found.shape == wanted.shape or carries(found.shape, wanted.shape)):
        given = f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
        raise DataError(
            f"the cache {said} cannot be filled from one of {given}: convert both programs with one calibration and "
            "config, for the same rows and max_cache_len, and pass the one in lanes second"
        )
