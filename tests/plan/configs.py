"""Configurations in the few words that the tests need."""

from typing import Any

from graphquant.config import KVCacheScheme, QuantizationArgs, QuantizationConfig, QuantizationScheme

INT8 = QuantizationArgs()
INT4 = QuantizationArgs(num_bits=4)
FP8 = QuantizationArgs(type="float")
HEADS = QuantizationArgs(strategy="attn_head")
CHANNELS = QuantizationArgs(strategy="channel")
TOKENS = QuantizationArgs(strategy="token")


def scheme(*targets: str, **given: QuantizationArgs) -> QuantizationScheme:
    return QuantizationScheme(targets=targets, **given)


def config(*schemes: QuantizationScheme, ignore: tuple[str, ...] = (), **kv: Any) -> QuantizationConfig:
    """Groups named a, b, c, …; ``key`` and ``value`` make the KV cache's scheme."""
    groups = {chr(ord("a") + index): group for index, group in enumerate(schemes)}
    return QuantizationConfig(config_groups=groups, ignore=ignore, kv_cache_scheme=KVCacheScheme(**kv) if kv else None)
