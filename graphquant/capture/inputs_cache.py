"""A Hugging Face causal model whose KV cache goes in as inputs and comes out as outputs.

transformers' cache objects are built inside of forward, from the inputs, and so never are part of the program.
Every attention layer gets a cache that keeps all positions; a sliding window is the mask's business.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._sympy.value_ranges import ValueRanges

from graphquant.capture.causal import with_forward
from graphquant.capture.export import export
from graphquant.capture.layers import CachedLayer, cached_layers, require_run

Past = tuple[tuple[Tensor, Tensor], ...]
_BATCH, _PAST, _SEQUENCE = 2, 3, 4
"""Of the example: above 1, and so that no sum or product of them is another."""


def capture_inputs_cache(model: nn.Module, *, sequence: int | None = None) -> ExportedProgram:
    """Export ``(input_ids, attention_mask, past_key_values) -> (logits, present)``, all dims dynamic.

    S is ``sequence``, where that is not None.

    Raises:
        CaptureError: the model keeps another state than keys and values, or torch.export could not.
    """
    layers = cached_layers(model)
    base: Any = type(model)

    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor, past_key_values: Past) -> tuple[Tensor, Past]:
        cache = _growing_cache(layers, past_key_values)
        logits: Tensor = base.forward(
            self, input_ids=input_ids, attention_mask=attention_mask, cache=cache, use_cache=True, return_dict=True
        ).logits
        return logits, tuple((layer.keys, layer.values) for layer in cache.layers if layer.keys is not None)

    kwargs = _example(model, layers, (_BATCH, _PAST, sequence or _SEQUENCE))
    free = Dim.DYNAMIC  # and no named dim: the mask is P + S long, a sum that torch.export does not let one be
    shapes = {
        "input_ids": {0: free, 1: free if sequence is None else Dim.STATIC},
        "attention_mask": {0: free, 1: free},
        "past_key_values": tuple(({0: free, 2: free}, {0: free, 2: free}) for _ in kwargs["past_key_values"]),
    }
    program = _from_one_token_on(export(with_forward(model, forward), (), kwargs, shapes))
    require_run(program, _example(model, layers, (1, 1, sequence or 1)), model)
    return program


def _example(model: nn.Module, layers: Sequence[CachedLayer], sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Inputs of a batch, a past and a sequence of some sizes."""
    batch, past, sequence = sizes
    ids = torch.zeros(batch, sequence, dtype=torch.int64, device=next(model.parameters()).device)
    pairs = tuple(
        tuple(states.new_zeros(batch, states.shape[1], past, states.shape[3]) for states in layer.pair())
        for layer in layers
        if layer.keys is not None
    )
    return {"input_ids": ids, "attention_mask": ids.new_ones(batch, past + sequence), "past_key_values": pairs}


def _from_one_token_on(program: ExportedProgram) -> ExportedProgram:
    """The program without a least length of the mask.

    torch.export lets every dynamic dim begin at 2, and by that lets one of 1 or 0 pass; but of P + S it makes 4, which
    it does check.
    """
    limits = program.range_constraints
    for symbol, given in limits.items():
        limits[symbol] = ValueRanges(min(given.lower, 2), given.upper)
    return program


def _growing_cache(layers: Sequence[CachedLayer], past: Past) -> Any:
    """transformers' growing cache with the given past."""
    from transformers.cache_utils import Cache, DynamicLayer

    new_layer: Any = DynamicLayer  # its constructor has no types

    pairs = iter(past)
    built: list[Any] = []
    for layer in layers:
        cached = new_layer()
        if layer.keys is not None:
            keys, values = next(pairs)
            cached.lazy_initialization(keys, values)
            cached.keys, cached.values = keys, values
        built.append(cached)
    return Cache(layers=built)
