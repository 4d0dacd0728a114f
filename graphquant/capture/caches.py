"""A Hugging Face causal model with its KV cache in the graph: as buffers that it writes to, or as inputs and outputs.

transformers' cache objects are built inside of forward, from buffers or inputs, and so never are part of the program.
Every attention layer gets a cache that keeps all positions; a sliding window is the mask's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._sympy.value_ranges import ValueRanges

from graphquant.capture.causal import with_forward
from graphquant.capture.export import export
from graphquant.errors import CaptureError

Past = tuple[tuple[Tensor, Tensor], ...]
_BATCH, _PAST, _SEQUENCE = 2, 3, 4
"""Of the example with the cache as inputs: above 1, and so that no sum or product of them is another."""


@dataclass(frozen=True)
class _Layer:
    """The keys and values ``[1, H, 2, D]`` that a layer writes for two tokens; None where it writes none."""

    keys: Tensor | None
    values: Tensor | None

    def pair(self) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that has them."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values


def capture_static_cache(model: nn.Module, max_cache_len: int) -> ExportedProgram:
    """Export ``(input_ids [1, S], cache_position [S]) -> logits [1, S, V]`` with a cache of ``max_cache_len`` tokens.

    Raises:
        CaptureError: the model keeps another state than keys and values, or torch.export could not.
    """
    layers = _layers(model)
    base: Any = type(model)

    def forward(self: Any, input_ids: Tensor, cache_position: Tensor) -> Tensor:
        cache = _static_cache(self, layers, max_cache_len, cache_position)
        logits: Tensor = base.forward(self, input_ids=input_ids, cache=cache, use_cache=True, return_dict=True).logits
        return logits

    shim = with_forward(model, forward)
    for index, layer in enumerate(layers):
        if layer.keys is not None:
            for name, states in zip(_names(index), layer.pair(), strict=True):
                _, heads, _, head_dim = states.shape
                shim.register_buffer(name, states.new_zeros(1, heads, max_cache_len, head_dim), persistent=False)
    ids = torch.zeros(1, min(_SEQUENCE, max_cache_len), dtype=torch.int64, device=next(model.parameters()).device)
    kwargs = {"input_ids": ids, "cache_position": torch.arange(ids.shape[1], device=ids.device)}
    sequence = Dim("sequence", min=1, max=max_cache_len)
    program = export(shim, (), kwargs, {"input_ids": {1: sequence}, "cache_position": {0: sequence}})
    _require_one_token(program, {name: value[..., :1] for name, value in kwargs.items()}, model)
    for index, layer in enumerate(layers):
        for name in _names(index) if layer.keys is not None else ():
            program.constants[name].zero_()  # what the trial wrote
    return program


def _names(index: int) -> tuple[str, str]:
    return f"key_cache_{index}", f"value_cache_{index}"


def _static_cache(module: Any, layers: Sequence[_Layer], max_cache_len: int, cache_position: Tensor) -> Any:
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


def capture_inputs_cache(model: nn.Module) -> ExportedProgram:
    """Export ``(input_ids, attention_mask, past_key_values) -> (logits, present)``, all dims dynamic.

    Raises:
        CaptureError: the model keeps another state than keys and values, or torch.export could not.
    """
    layers = _layers(model)
    base: Any = type(model)

    def forward(self: Any, input_ids: Tensor, attention_mask: Tensor, past_key_values: Past) -> tuple[Tensor, Past]:
        cache = _growing_cache(layers, past_key_values)
        logits: Tensor = base.forward(
            self, input_ids=input_ids, attention_mask=attention_mask, cache=cache, use_cache=True, return_dict=True
        ).logits
        return logits, tuple((layer.keys, layer.values) for layer in cache.layers if layer.keys is not None)

    device = next(model.parameters()).device
    ids = torch.zeros(_BATCH, _SEQUENCE, dtype=torch.int64, device=device)
    past = tuple(
        tuple(states.new_zeros(_BATCH, states.shape[1], _PAST, states.shape[3]) for states in layer.pair())
        for layer in layers
        if layer.keys is not None
    )
    kwargs = {"input_ids": ids, "attention_mask": ids.new_ones(_BATCH, _PAST + _SEQUENCE), "past_key_values": past}
    free = Dim.DYNAMIC  # and no named dim: the mask is P + S long, a sum that torch.export does not let one be
    shapes = {
        "input_ids": {0: free, 1: free},
        "attention_mask": {0: free, 1: free},
        "past_key_values": tuple(({0: free, 2: free}, {0: free, 2: free}) for _ in past),
    }
    program = _from_one_token_on(export(with_forward(model, forward), (), kwargs, shapes))
    one = {"input_ids": ids[:1, :1], "attention_mask": ids.new_ones(1, 2)}
    nothing = tuple(tuple(states[:1, :, :1] for states in pair) for pair in past)
    _require_one_token(program, one | {"past_key_values": nothing}, model)
    return program


def _require_one_token(program: ExportedProgram, inputs: dict[str, Any], model: nn.Module) -> None:
    """Run a program on one token: a model may slice by the length of the cache, which only a longer sequence allows.

    Raises:
        CaptureError: it does not run.
    """
    try:
        with torch.no_grad():
            program.module()(**inputs)
    except (AssertionError, RuntimeError) as error:
        raise CaptureError(
            f"the graph that torch.export makes of {type(model).__name__} with a cache does not run on one token, as "
            "the model slices its positions by the length of the cache: capture it with cache=None"
        ) from error


def _from_one_token_on(program: ExportedProgram) -> ExportedProgram:
    """The program without a least length of the mask.

    torch.export lets every dynamic dim begin at 2, and by that lets one of 1 or 0 pass; but of P + S it makes 4, which
    it does check.
    """
    limits = program.range_constraints
    for symbol, given in limits.items():
        limits[symbol] = ValueRanges(min(given.lower, 2), given.upper)
    return program


def _growing_cache(layers: Sequence[_Layer], past: Past) -> Any:
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


def _layers(model: nn.Module) -> list[_Layer]:
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
    return [_Layer(layer.keys, layer.values) for layer in layers]
