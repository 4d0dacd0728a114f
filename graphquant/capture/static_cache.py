"""A Hugging Face causal model whose KV cache is buffers that the graph writes to.

transformers' cache objects are built inside of forward, from the buffers, and so never are part of the program.
Every attention layer gets a cache that keeps all positions; a sliding window is the mask's business.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from graphquant.capture.causal import with_forward
from graphquant.capture.export import export
from graphquant.capture.layers import CachedLayer, cached_layers, require_run

_SEQUENCE = 4
"""Tokens of the example where their number is dynamic: above 1, which torch.export would make a constant."""


def capture_static_cache(
    model: nn.Module, max_cache_len: int, *, sequence: int | None = None, batch: int = 1
) -> ExportedProgram:
    """Export ``(input_ids [B, S], cache_position [S]) -> logits [B, S, V]`` with a cache of ``max_cache_len`` tokens.

    B is ``batch``; S is ``sequence``, or dynamic where that is None.

    Raises:
        CaptureError: the model keeps another state than keys and values, or torch.export could not.
    """
    layers = cached_layers(model)
    base: Any = type(model)

    def forward(self: Any, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        cache = _static_cache(self, layers, max_cache_len, cache_position)
        logits: Tensor = base.forward(self, input_ids=input_ids, cache=cache, use_cache=True, return_dict=True).logits
        return logits

    shim = with_forward(model, forward)
    for name, states in _buffers(layers):
        _, heads, _, head_dim = states.shape
        shim.register_buffer(name, states.new_zeros(batch, heads, max_cache_len, head_dim), persistent=False)
    length = sequence or min(_SEQUENCE, max_cache_len)
    ids = torch.zeros(batch, length, dtype=torch.int64, device=next(model.parameters()).device)
    kwargs = {"input_ids": ids, "cache_position": torch.arange(length, device=ids.device)}
    free = Dim("sequence", min=1, max=max_cache_len) if sequence is None else Dim.STATIC
    program = export(shim, (), kwargs, {"input_ids": {1: free}, "cache_position": {0: free}})
    least = sequence or 1
    require_run(program, {name: value[..., :least] for name, value in kwargs.items()}, model)
    for name, _ in _buffers(layers):
        program.constants[name].zero_()  # what the trial wrote
    return program


def _names(index: int) -> tuple[str, str]:
    return f"key_cache_{index}", f"value_cache_{index}"


def _buffers(layers: Sequence[CachedLayer]) -> list[tuple[str, Tensor]]:
    """The names of all buffers, and the states that each is for."""
    return [
        pair
        for index, layer in enumerate(layers)
        if layer.keys is not None
        for pair in zip(_names(index), layer.pair(), strict=True)
    ]


def _static_cache(module: Any, layers: Sequence[CachedLayer], max_cache_len: int, cache_position: Tensor) -> Any:
    """transformers' static cache over a module's buffers, written to from ``cache_position[0]`` on."""
    from transformers.cache_utils import Cache, StaticLayer

    built: list[Any] = []
    for index, layer in enumerate(layers):
        cached: Any = StaticLayer(max_cache_len if layer.keys is not None else 0)
        if layer.keys is not None:
            cached.keys, cached.values = (getattr(module, name) for name in _names(index))
            # A copy: the layer adds to it in place, and would write to the program's input.
            cached.cumulative_length = cache_position[0].clone()
            cached.device, cached.is_initialized = cached.keys.device, True
        built.append(cached)
    return Cache(layers=built)
