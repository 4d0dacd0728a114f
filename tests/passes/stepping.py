"""Programs with a KV cache run step by step, and modules with a cache of their own, for the tests of stored caches.

The models are float64: codes are rounded in float32, so a sum in another order, of float64, does not move a value
across a tie between two codes. What should be equal then is equal to 1e-12, whatever the format.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_map
from transformers import LlamaForCausalLM

import graphquant as gq
from graphquant.loops import runnable
from tests.passes.helpers import args
from tests.passes.modules import HEAD_DIM, HEADS, Base, x_of
from tests.tiny import VOCABULARY, tiny_batches, tiny_llama

LENGTH = 16
STEPS = (4, 1, 5)
TOKENS = torch.randint(0, VOCABULARY, (3, 10), generator=torch.Generator().manual_seed(2))
NONE: dict[str, Any] = {}
CAPTURES: dict[str, dict[str, Any]] = {
    "static": {"cache": "static", "max_cache_len": LENGTH},
    "static-3": {"cache": "static", "max_cache_len": LENGTH, "batch": 3},
    "one token": {"cache": "static", "max_cache_len": LENGTH, "sequence": 1},
    "inputs": {"cache": "inputs"},
    "none": NONE,
}
FORMATS: dict[str, dict[str, Any]] = {
    "int8": NONE,
    "int4-asym": {"num_bits": 4, "symmetric": False},
    "uint8-asym": {"type": "uint", "symmetric": False},
    "e4m3": {"type": "float"},
    "e5m2": {"type": "float", "float_format": "e5m2"},
} | {f"int{bits}": {"num_bits": bits} for bits in range(2, 8)}
ONES = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}


@cache
def model(dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """One layer of 4 heads and 2 KV heads of 8 channels."""
    return tiny_llama(num_hidden_layers=1).to(dtype)


@cache
def program(form: str, dtype: torch.dtype = torch.float64) -> ExportedProgram:
    """The model with one of the ``CAPTURES``."""
    return gq.capture(model(dtype), **CAPTURES[form])


def config(
    place: str, key: gq.QuantizationArgs, value: gq.QuantizationArgs | None = None, **query: Any
) -> gq.QuantizationConfig:
    """Keys and values, at the states or at the outputs of k_proj and v_proj; no value where none is given."""
    given = {"key": key} | ({} if value is None else {"value": value}) | query
    if place == "states":
        states: Any = {f"{name}_states": chosen for name, chosen in given.items()}
        return gq.QuantizationConfig(config_groups={"": gq.QuantizationScheme(targets=("role:attention",), **states)})
    return gq.QuantizationConfig(
        config_groups={
            name: gq.QuantizationScheme(targets=(f"role:{name[0]}_proj",), output_activations=chosen)
            for name, chosen in given.items()
        }
    )


def setting(place: str, strategy: str, key: str, value: str) -> gq.QuantizationConfig:
    """One strategy, a format for keys and one for values."""
    return config(place, args(strategy, **FORMATS[key]), args(strategy, **FORMATS[value]))


@cache
def calibration(place: str) -> gq.Calibration:
    """Of keys and values at a place, in the program without a cache: it answers every format and strategy."""
    prepared = gq.prepare(program("none"), config(place, args(), args()))
    return gq.calibrate(prepared, tiny_batches(), progress=False)


def fake_quantized(chosen: gq.QuantizationConfig, batch: dict[str, Tensor] = ONES) -> Tensor:
    """The logits of whole sequences at once, in the prepared module's fake_quant mode and without a cache."""
    prepared = gq.prepare(program("none"), chosen)
    gq.calibrate(prepared, tiny_batches(), progress=False)
    gq.set_mode(prepared, "fake_quant")
    with torch.no_grad():
        return prepared(**batch)


def stored(form: str, place: str, chosen: gq.QuantizationConfig, dtype: torch.dtype = torch.float64) -> ExportedProgram:
    return gq.convert(program(form, dtype), calibration(place), chosen, kv_cache="stored")


def takes_past(given: ExportedProgram) -> bool:
    return "cache_position" not in given.graph_signature.user_inputs


def empty_past(given: ExportedProgram, rows: int) -> Any:
    """The past of no tokens; along the sequence its tensors have dim 1 of three, or 2 of four."""

    def empty(example: Tensor) -> Tensor:
        shape = [rows, *example.shape[1:]]
        shape[example.dim() - 2] = 0
        return example.new_zeros(shape)

    assert given.example_inputs is not None
    return tree_map(empty, given.example_inputs[1]["past_key_values"])


class Session:
    """One sequence (or several rows of one) run through a program, with a cache that begins empty."""

    def __init__(self, given: ExportedProgram, rows: int = 1) -> None:
        self.module, self.seen = runnable(given), 0
        self.past = empty_past(given, rows) if takes_past(given) else None

    def step(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits of the next tokens, ``mask`` being that of all tokens so far."""
        start, self.seen = self.seen, self.seen + ids.shape[1]
        with torch.no_grad():
            if self.past is None:
                return self.module(input_ids=ids, cache_position=torch.arange(start, self.seen))
            mask = torch.ones(len(ids), self.seen, dtype=torch.int64) if mask is None else mask
            out, self.past = self.module(input_ids=ids, attention_mask=mask, past_key_values=self.past)
            return out

    def run(self, ids: Tensor, steps: Sequence[int] = STEPS, mask: Tensor | None = None) -> Tensor:
        """Logits of all tokens, that many a step."""
        logits = []
        for step in steps:
            start, end = self.seen, self.seen + step
            logits.append(self.step(ids[:, start:end], None if mask is None else mask[:, :end]))
        return torch.cat(logits, dim=1)

    def held(self) -> list[Tensor]:
        """What the cache is: the buffers by name, or the past, keys before values, layer by layer."""
        if self.past is not None:
            return tree_leaves(self.past)
        buffers = dict(self.module.named_buffers())
        layers = sum(name.startswith("key_cache_") and name.removeprefix("key_cache_").isdigit() for name in buffers)
        names = [f"{kind}_cache_{layer}" for layer in range(layers) for kind in ("key", "value")]
        parts = [f"{name}{suffix}" for name in names for suffix in ("", "_scale", "_zero_point")]
        return [buffers[part] for part in parts if part in buffers]


def run(given: ExportedProgram, ids: Tensor, steps: Sequence[int] = STEPS, mask: Tensor | None = None) -> Tensor:
    return Session(given, len(ids)).run(ids, steps, mask)


class Cached(Base):
    """``(x [B, S, 16], position [S])``: an attention with a cache of 8 tokens, and something ``added`` to its output.

    Keys are ``turned`` (times their position, or times an input ``turn [S]``), as rotary embedding does in its way.
    """

    length, head_dim = 8, HEAD_DIM

    def __init__(self, added: str = "", turned: str = "", write: str = "index_copy", rows: int = 1) -> None:
        super().__init__()
        self.added, self.turned, self.write = added, turned, write
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(rows, HEADS, self.length, self.head_dim), persistent=False)

    def forward(self, x: Tensor, position: Tensor, turn: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x)
        if self.turned == "in place":
            k = k.clone()
            k.clamp_(-1.0, 1.0)
        elif self.turned:
            k = k * (1 + (position if turn is None else turn))[:, None]
        before = self.keys.sum() if self.added == "before" else 0.0
        if self.write == "index_put":
            self.keys[:, :, position], self.values[:, :, position] = k, v
        else:
            self.keys.index_copy_(2, position, k)
            self.values.index_copy_(2, position, v)
        mask = torch.arange(self.length) <= position[:, None]
        out = self.join(F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask))
        more = {"after": self.keys.sum, "states": lambda: self.join(k), "output": lambda: self.k_proj(x)}
        return out + before + (more[self.added]() if self.added in more else 0.0)


class OddCached(Cached):
    """Heads of three channels: the fourth is left out."""

    head_dim = 3

    def heads(self, x: Tensor) -> Tensor:
        return super().heads(x)[..., :3]


class Growing(Base):
    """``(x, past keys, past values)`` to the output and the present, of which a ``part`` may be left out."""

    def __init__(self, shared: bool = False, part: int = 0) -> None:
        super().__init__()
        self.shared, self.part = shared, part

    def forward(self, x: Tensor, past_keys: Tensor, past_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x)
        keys = torch.cat([past_keys, k], 2)
        values = torch.cat([past_keys if self.shared else past_values, v], 2)
        out = self.join(F.scaled_dot_product_attention(q, keys, values))
        return out, keys[:, :, self.part :] if self.part else keys, values


def positions(tokens: int, rows: int = 1, **more: Tensor) -> dict[str, Tensor]:
    """The inputs of a ``Cached`` at its first tokens."""
    return {"x": x_of(rows, tokens), "position": torch.arange(tokens)} | more


def quantizes(
    module: torch.nn.Module, batch: dict[str, Tensor], chosen: gq.QuantizationConfig
) -> Callable[..., ExportedProgram]:
    """``convert`` of a module, calibrated on the batch that it is captured with."""
    captured = gq.capture(module.eval(), example_kwargs=batch)
    prepared = gq.prepare(captured, chosen)
    seen = gq.calibrate(prepared, [batch], progress=False)
    return partial(gq.convert, captured, seen, chosen)
