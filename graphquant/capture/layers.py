"""What every layer of a model caches, and the trial that a graph with a cache must pass."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from graphquant.errors import CaptureError


@dataclass(frozen=True)
class CachedLayer:
    """The keys and values ``[1, H, 2, D]`` that a layer writes for two tokens; None where it writes none."""

    keys: Tensor | None
    values: Tensor | None

    def pair(self) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that has them."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values


def cached_layers(model: nn.Module) -> list[CachedLayer]:
    """What every layer of a model caches, seen by running it on two tokens.

    Raises:
        CaptureError: it keeps no cache, or a layer keeps another state than keys and values.
    """
    name = type(model).__name__
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=True, return_dict=True)
    cache = getattr(output, "cache", None) or getattr(output, "past_key_values", None)
    layers = getattr(cache, "layers", None)
    if not layers:
        raise CaptureError(f"{name} returns no KV cache that transformers knows: capture it with cache=None")
    for index, layer in enumerate(layers):
        if not isinstance(getattr(layer, "keys", None), Tensor | None) or hasattr(layer, "conv_states"):
            raise CaptureError(
                f"layer {index} of {name} keeps a {type(layer).__name__}; expected keys and values alone: capture it "
                "with cache=None"
            )
    return [CachedLayer(layer.keys, layer.values) for layer in layers]


def require_run(program: ExportedProgram, inputs: dict[str, Any], model: nn.Module) -> None:
    """Run a program on as few tokens as it takes: a model may slice by the length of the cache, which only more allow.

    Raises:
        CaptureError: it does not run.
    """
    try:
        with torch.no_grad():
            program.module()(**inputs)
    except (AssertionError, RuntimeError) as error:
        count = inputs["input_ids"].shape[1]
        raise CaptureError(
            f"the graph that torch.export makes of {type(model).__name__} with a cache does not run on "
            f"{'one token' if count == 1 else f'{count} tokens'}, as the model slices its positions by the length of "
            "the cache: capture it with cache=None"
        ) from error
