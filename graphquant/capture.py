"""HF model → ``ExportedProgram``: one signature, dynamic batch and sequence, the model left as it was."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node

from graphquant.errors import CaptureError

EXAMPLE_SHAPE = (2, 8)
"""Batch and sequence of the example: a batch of 1 would specialise a dim that is asked to be dynamic."""


def capture(
    model: nn.Module | ExportedProgram,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    example_args: Sequence[Any] = (),
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Export a model to an ``ExportedProgram``; a program is returned as it is.

    A Hugging Face causal model needs no example: it becomes ``(input_ids [B, S], attention_mask [B, S]) -> logits
    [B, S, V]``, with B and S dynamic from 1 upwards. Any other module takes ``example_kwargs`` and ``example_args``
    (and torch.export's ``dynamic_shapes``; without them the first two dims of every example tensor are dynamic where
    the model allows it). The module, its config and its generation_config are not changed.

    Raises:
        CaptureError: the model has no example, cannot be exported, or would drop out values in training mode.
    """
    if isinstance(model, ExportedProgram):
        return model
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected an nn.Module or an ExportedProgram, found {type(model).__name__}")
    if isinstance(example_args, Tensor):
        raise CaptureError("example_args is a tensor; expected a tuple of inputs, such as (x,)")
    if example_kwargs is None and not example_args:
        if not _is_hugging_face(model):
            raise CaptureError(
                f"{type(model).__name__} is no Hugging Face causal model, so capture needs example inputs: "
                "capture(model, example_kwargs={...}) or example_args=(...)"
            )
        return _without_dropout(_capture_causal(model), model)
    kwargs = dict(example_kwargs or {})
    args = tuple(example_args)
    shapes = _default_dynamic_shapes(model, args, kwargs) if dynamic_shapes is None else dynamic_shapes
    return _without_dropout(_export(model, args, kwargs, shapes), model)


def _is_hugging_face(model: nn.Module) -> bool:
    from transformers import PreTrainedModel

    anything: Any = model  # transformers leaves this method untyped
    return isinstance(model, PreTrainedModel) and anything.get_output_embeddings() is not None


def _capture_causal(model: nn.Module) -> ExportedProgram:
    device = next(model.parameters()).device
    ids = torch.zeros(EXAMPLE_SHAPE, dtype=torch.int64, device=device)
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch, sequence = Dim("batch", min=1), Dim("sequence", min=1)
    named = {name: {0: batch, 1: sequence} for name in kwargs}
    try:
        return _export(_logits_only(model), (), kwargs, named)
    except CaptureError:
        # Some models relate the dims in ways that named dims may not have; DYNAMIC still refuses to specialise one.
        derived = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in kwargs}
        return _export(_logits_only(model), (), kwargs, derived)


def _logits_only(model: nn.Module) -> nn.Module:
    """A shallow copy of a causal model whose forward is ``(input_ids, attention_mask) -> logits``.

    A copy with its own class, and not a wrapper around the model, so that the parameters keep their names and the
    module paths in the graph are the model's own.
    """
    base = type(model)

    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output = base.forward(
            self, input_ids=input_ids, attention_mask=attention_mask, use_cache=False, return_dict=True
        )
        logits: Tensor = output.logits
        return logits

    shallow = copy.copy(model)
    names = {"forward": forward, "__module__": base.__module__, "__qualname__": base.__qualname__}
    shallow.__class__ = type(base.__name__, (base,), names)
    return shallow


def _default_dynamic_shapes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """By the names of forward's parameters, which is the one form that torch.export takes for args and kwargs both."""
    try:
        given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise CaptureError(f"the example inputs do not fit {type(model).__name__}.forward: {error}") from None

    def first_two(value: Any) -> Any:
        return dict.fromkeys(range(min(2, value.dim())), Dim.AUTO) if isinstance(value, Tensor) else None

    return {name: torch.utils._pytree.tree_map(first_two, value) for name, value in given.items()}


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any) -> ExportedProgram:
    try:
        with torch.no_grad():
            return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CaptureError(
            f"torch.export could not export {type(model).__name__}: {type(error).__name__}: {first}"
        ) from error


def _without_dropout(program: ExportedProgram, model: nn.Module) -> ExportedProgram:
    """The program, where no node of it drops values at random."""
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
