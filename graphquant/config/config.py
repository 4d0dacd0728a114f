"""QuantizationConfig: a whole configuration, as a value, in compressed-tensors' JSON form and as a recipe.

``QuantizationConfig.from_dict(c.to_dict()) == c`` and ``QuantizationConfig.from_recipe(file) == c`` after
``c.to_recipe(file)``, for every ``c``.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from graphquant.config.reading import FrozenMap, check_keys, join, located, read_mapping, read_strings
from graphquant.config.recipes import read_recipe, write_recipe
from graphquant.config.scheme import KVCacheScheme, QuantizationScheme, check_targets
from graphquant.errors import ConfigError

QUANT_METHOD = "compressed-tensors"
_KEYS = ("config_groups", "ignore", "kv_cache_scheme")
_EMPTY_ONLY = ("sparsity_config", "transform_config")
# Facts about a checkpoint's weights, which do not change what is quantized.
_METADATA = ("quant_method", "format", "quantization_status", "global_compression_ratio", "version", *_EMPTY_ONLY)


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Named schemes, the modules to leave alone, and the KV cache's scheme.

    Raises:
        ConfigError: nothing to quantize, or a part of the wrong kind.
    """

    config_groups: Mapping[str, QuantizationScheme] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    kv_cache_scheme: KVCacheScheme | None = None

    def __post_init__(self) -> None:
        groups = read_mapping(self.config_groups, "name → QuantizationScheme", "config_groups")
        for name, scheme in groups.items():
            if not isinstance(scheme, QuantizationScheme):
                raise ConfigError(f"config_groups.{name} must be a QuantizationScheme, not {type(scheme).__name__}")
        if self.kv_cache_scheme is not None and not isinstance(self.kv_cache_scheme, KVCacheScheme):
            raise ConfigError(f"kv_cache_scheme must be a KVCacheScheme, not {type(self.kv_cache_scheme).__name__}")
        if not groups and self.kv_cache_scheme is None:
            raise ConfigError("nothing to quantize: give config_groups or kv_cache_scheme")
        object.__setattr__(self, "config_groups", FrozenMap(groups))
        object.__setattr__(self, "ignore", read_strings(self.ignore, "ignore"))
        with located("ignore"):
            check_targets(self.ignore)

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Self:
        """Read the JSON form, or a model's config.json that holds it as ``quantization_config``.

        Raises:
            ConfigError: an unknown key, another quantization method, or values that a part refuses.
        """
        given = read_mapping(data, "a quantization config", where)
        if "quantization_config" in given:
            if beside := [key for key in _KEYS if key in given]:
                with located(where):
                    raise ConfigError(f"quantization_config and {', '.join(beside)} are both given; keep one")
            where = join(where, "quantization_config")
            given = read_mapping(given["quantization_config"], "a quantization config", where)
        check_keys(given, _KEYS, where, tolerated=_METADATA)
        _check_metadata(given, where)
        groups_at, kv_at = join(where, "config_groups"), join(where, "kv_cache_scheme")
        groups = read_mapping(_or_empty(given.get("config_groups")), "name → scheme", groups_at)
        schemes = {name: QuantizationScheme.from_dict(group, join(groups_at, name)) for name, group in groups.items()}
        kv = given.get("kv_cache_scheme")
        kv_scheme = None if kv is None else KVCacheScheme.from_dict(kv, kv_at)
        ignore = given.get("ignore")
        with located(where):
            return cls(config_groups=schemes, ignore=() if ignore is None else ignore, kv_cache_scheme=kv_scheme)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, as it stands in config.json under ``quantization_config``."""
        return {"quant_method": QUANT_METHOD, **self._parts()}

    @classmethod
    def from_recipe(cls, path: str | os.PathLike[str]) -> Self:
        """Read an llm-compressor recipe (YAML) with one QuantizationModifier.

        Raises:
            ConfigError: the file, its form or one of its values cannot be used; the message has the path inside it.
        """
        with located(os.fspath(path)):
            recipe = read_recipe(path)
            return cls.from_dict(recipe.modifier, recipe.where)

    def to_recipe(self, path: str | os.PathLike[str]) -> None:
        """Write a recipe that ``from_recipe`` reads back as an equal configuration; an existing file is replaced.

        Raises:
            OutputError: the file cannot be written.
        """
        write_recipe(path, self._parts())

    def _parts(self) -> dict[str, Any]:
        return {
            "config_groups": {name: scheme.to_dict() for name, scheme in self.config_groups.items()},
            "ignore": list(self.ignore),
            "kv_cache_scheme": None if self.kv_cache_scheme is None else self.kv_cache_scheme.to_dict(),
        }


def _or_empty(value: object) -> object:
    return {} if value is None else value


def _check_metadata(given: Mapping[str, Any], where: str) -> None:
    """Refuse what another method wrote, and sparsity or transforms, which would change the values."""
    with located(where):
        method = given.get("quant_method")
        if method not in (None, QUANT_METHOD):
            raise ConfigError(f"quant_method must be {QUANT_METHOD!r}, not {method!r}")
        for key in _EMPTY_ONLY:
            if given.get(key) not in (None, {}):
                raise ConfigError(f"{key} is not supported: leave it out, or set it null")
