"""A Hugging Face causal model without a cache: ``(input_ids, attention_mask) -> logits``."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from graphquant.capture.export import export
from graphquant.errors import CaptureError

EXAMPLE_SHAPE = (2, 8)
"""Batch and sequence of the example: a batch of 1 would specialise a dim that is asked to be dynamic."""


def is_causal(model: nn.Module) -> bool:
    """Whether a model is one of transformers', with logits over a vocabulary."""
    from transformers import PreTrainedModel

    anything: Any = model  # transformers leaves this method untyped
    return isinstance(model, PreTrainedModel) and anything.get_output_embeddings() is not None


def capture_causal(model: nn.Module) -> ExportedProgram:
    """Export ``(input_ids [B, S], attention_mask [B, S]) -> logits [B, S, V]``, B and S dynamic from 1 upwards.

    Raises:
        CaptureError: torch.export could not.
    """
    device = next(model.parameters()).device
    ids = torch.zeros(EXAMPLE_SHAPE, dtype=torch.int64, device=device)
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch, sequence = Dim("batch", min=1), Dim("sequence", min=1)
    named = {name: {0: batch, 1: sequence} for name in kwargs}
    try:
        return export(_logits_only(model), (), kwargs, named)
    except CaptureError:
        # Some models relate the dims in ways that named dims may not have; DYNAMIC still refuses to specialise one.
        derived = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in kwargs}
        return export(_logits_only(model), (), kwargs, derived)


def _logits_only(model: nn.Module) -> nn.Module:
    base: Any = type(model)

    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        output = base.forward(
            self, input_ids=input_ids, attention_mask=attention_mask, use_cache=False, return_dict=True
        )
        logits: Tensor = output.logits
        return logits

    return with_forward(model, forward)


def with_forward(model: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A shallow copy of a model with another forward, and buffers that can be added to without adding to the model's.

    A copy with its own class, and not a wrapper around the model, so that the parameters keep their names and the
    module paths in the graph are the model's own.
    """
    base = type(model)
    shallow = copy.copy(model)
    shallow._buffers = dict(model._buffers)
    shallow._non_persistent_buffers_set = set(model._non_persistent_buffers_set)
    names = {"forward": forward, "__module__": base.__module__, "__qualname__": base.__qualname__}
    shallow.__class__ = type(base.__name__, (base,), names)
    return shallow
