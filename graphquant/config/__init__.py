"""Configurations: arguments, schemes, whole configurations; recipes in and out; presets by name."""

from graphquant.config.args import QuantizationArgs
from graphquant.config.config import QuantizationConfig
from graphquant.config.presets import PRESETS, Preset, preset
from graphquant.config.scheme import ROLE_TARGETS, KVCacheScheme, QuantizationScheme, check_targets

__all__ = [
    "PRESETS",
    "ROLE_TARGETS",
    "KVCacheScheme",
    "Preset",
    "QuantizationArgs",
    "QuantizationConfig",
    "QuantizationScheme",
    "check_targets",
    "preset",
]
