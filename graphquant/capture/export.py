"""torch.export, its errors as ours, and what must not be in a captured program."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from graphquant.errors import CaptureError


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> ExportedProgram:
    """Export a module, without gradients.

    Raises:
        CaptureError: torch.export could not.
    """
    try:
        with torch.no_grad():
            return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(
            f"torch.export could not export {type(model).__name__}: {type(error).__name__}: {first}"
        ) from error


def default_dynamic_shapes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """By the names of forward's parameters, which is the one form that torch.export takes for args and kwargs both.

    Raises:
        CaptureError: the inputs do not fit the module's forward.
    """
    try:
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise CaptureError(f"the example inputs do not fit {type(model).__name__}.forward: {error}") from None

    def first_two(value: Any) -> Any:
        return dict.fromkeys(range(min(2, value.dim())), Dim.AUTO) if isinstance(value, Tensor) else None

    return {name: torch.utils._pytree.tree_map(first_two, value) for name, value in given.items()}


def refuse_dropout(program: ExportedProgram, model: nn.Module) -> ExportedProgram:
    """The program, where no node of it drops values at random.

    Raises:
        CaptureError: one does.
    """
    if any(map(_drops_out, program.graph.nodes)):
        raise CaptureError(
            f"{type(model).__name__} is in training mode, and dropout would be captured: call model.eval()"
        )
    return program


def _drops_out(node: Node) -> bool:
    """Whether a node drops values at random, be it a dropout or an attention with dropout in it."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    share = given.get("p", given.get("dropout", 0.0)) if given.get("train") is True else given.get("dropout_p", 0.0)
    return bool(share > 0.0)
