"""Presets: configurations by name, each written with the public classes as a user would.

Names read number format, what is quantized, strategy. ``kv``: the keys and values as a cache stores them; ``qkv``:
the queries too; ``proj``: outputs of the linear layers, before rotary embedding. Symmetric where not said otherwise.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from graphquant.config.args import QuantizationArgs
from graphquant.config.config import QuantizationConfig
from graphquant.config.reading import did_you_mean
from graphquant.config.scheme import KVCacheScheme, QuantizationScheme
from graphquant.errors import SelectorError


class Preset(NamedTuple):
    """A sentence for tables, and the function that makes the configuration."""

    description: str
    build: Callable[[], QuantizationConfig]


def _args(kind: str, strategy: str, symmetric: bool = True, group_size: int | None = None) -> QuantizationArgs:
    num_bits, type = {"int8": (8, "int"), "int4": (4, "int"), "fp8": (8, "float")}[kind]
    return QuantizationArgs(num_bits=num_bits, type=type, symmetric=symmetric, strategy=strategy, group_size=group_size)


def _kv(kind: str, strategy: str, symmetric: bool = True, group_size: int | None = None) -> QuantizationConfig:
    args = _args(kind, strategy, symmetric, group_size)
    return QuantizationConfig(kv_cache_scheme=KVCacheScheme(key=args, value=args))


def _qkv_states(kind: str, strategy: str) -> QuantizationConfig:
    scheme = QuantizationScheme(targets=("role:attention",), input_activations=_args(kind, strategy))
    return QuantizationConfig(config_groups={"attention": scheme})


def _qkv_projections(kind: str, strategy: str) -> QuantizationConfig:
    targets = ("role:q_proj", "role:k_proj", "role:v_proj")
    scheme = QuantizationScheme(targets=targets, output_activations=_args(kind, strategy))
    return QuantizationConfig(config_groups={"projections": scheme})


def _int4_kproj_v() -> QuantizationConfig:
    # Rotary embedding mixes pairs of key channels, whose outliers are per channel; before it a channel scale fits.
    keys = QuantizationScheme(targets=("role:k_proj",), output_activations=_args("int4", "channel", symmetric=False))
    values = QuantizationScheme(
        targets=("role:attention",), value_states=_args("int4", "attn_head_channel", symmetric=False)
    )
    return QuantizationConfig(config_groups={"keys": keys, "values": values})


PRESETS: dict[str, Preset] = {
    "int8-kv-tensor": Preset("keys and values in int8, one scale each a layer", partial(_kv, "int8", "tensor")),
    "int8-kv-channel": Preset(
        "keys and values in int8, one scale a head_dim channel, shared by the heads", partial(_kv, "int8", "channel")
    ),
    "int8-kv-attn-head": Preset("keys and values in int8, one scale a KV head", partial(_kv, "int8", "attn_head")),
    "int8-kv-attn-head-channel": Preset(
        "keys and values in int8, one scale a KV head and channel", partial(_kv, "int8", "attn_head_channel")
    ),
    "int8-kv-token": Preset(
        "keys and values in int8, one dynamic scale a token and head", partial(_kv, "int8", "token")
    ),
    "int4-kv-channel": Preset(
        "keys and values in int4, one scale a head_dim channel, shared by the heads", partial(_kv, "int4", "channel")
    ),
    "int4-kv-attn-head-channel": Preset(
        "keys and values in asymmetric int4, one scale a KV head and channel",
        partial(_kv, "int4", "attn_head_channel", symmetric=False),
    ),
    "int4-kv-group32": Preset(
        "keys and values in asymmetric int4, one scale a KV head and 32 channels",
        partial(_kv, "int4", "group", symmetric=False, group_size=32),
    ),
    "int4-kproj-v": Preset(
        "keys before rotary embedding and values in asymmetric int4, one scale a channel: the accurate 4-bit setting",
        _int4_kproj_v,
    ),
    "int8-qkv-attn-head": Preset(
        "queries, keys and values in int8, one scale a head", partial(_qkv_states, "int8", "attn_head")
    ),
    "int8-qkv-proj-channel": Preset(
        "outputs of q_proj, k_proj and v_proj in int8, one scale a channel",
        partial(_qkv_projections, "int8", "channel"),
    ),
    "fp8-kv-tensor": Preset("keys and values in fp8 e4m3, one scale each a layer", partial(_kv, "fp8", "tensor")),
    "fp8-kv-attn-head": Preset("keys and values in fp8 e4m3, one scale a KV head", partial(_kv, "fp8", "attn_head")),
    "fp8-qkv-attn-head": Preset(
        "queries, keys and values in fp8 e4m3, one scale a head", partial(_qkv_states, "fp8", "attn_head")
    ),
}


def preset(name: str) -> QuantizationConfig:
    """The configuration called ``name``.

    Raises:
        SelectorError: there is none, with the closest name and all of them.
    """
    if name not in PRESETS:
        raise SelectorError(f"unknown preset {name!r}{did_you_mean(name, PRESETS)} (known: {', '.join(PRESETS)})")
    return PRESETS[name].build()
