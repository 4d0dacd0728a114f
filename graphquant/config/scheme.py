"""Schemes: which tensors of which modules are quantized, and the KV cache's own short form.

A target is ``re:`` and a regular expression over module paths, ``role:`` and one of four roles that the attention
finder knows (ours: they hold whatever the modules are called), or else a module path or class name.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from graphquant.config.args import QuantizationArgs
from graphquant.config.reading import check_keys, did_you_mean, join, located, read_mapping, read_strings
from graphquant.errors import ConfigError, SelectorError

ROLE_TARGETS = ("role:attention", "role:q_proj", "role:k_proj", "role:v_proj")
_ACTIVATIONS = ("input_activations", "output_activations")
_STATES = ("query_states", "key_states", "value_states")
_SCHEME_KEYS = ("targets", "weights", *_ACTIVATIONS, *_STATES)
_KV_KEYS = ("key", "value")


def check_targets(targets: Iterable[str]) -> None:
    """Refuse a target (or ignore entry) that can never select anything.

    Raises:
        ConfigError: an empty string, or a regular expression that does not compile.
        SelectorError: a ``role:`` that does not exist.
    """
    for target in targets:
        kind, colon, rest = target.partition(":")
        if not target or (colon and kind in ("re", "role") and not rest):
            raise ConfigError(f"target {target!r} is empty; give a module path, a class name, re:… or role:…")
        if target.startswith("re:"):
            try:
                re.compile(rest)
            except (re.error, OverflowError, RecursionError) as error:
                raise ConfigError(f"target {target!r} is no regular expression: {error}") from None
        if target.startswith("role:") and target not in ROLE_TARGETS:
            guess = did_you_mean(target, ROLE_TARGETS)
            raise SelectorError(f"target {target!r} is no role{guess} (known: {', '.join(ROLE_TARGETS)})")


@dataclass(frozen=True, kw_only=True)
class QuantizationScheme:
    """The tensors to quantize at the modules that ``targets`` select.

    On an attention module ``input_activations`` means its query, key and value states alike; ``query_states``,
    ``key_states`` and ``value_states`` say each on its own.

    Raises:
        ConfigError: no targets, a target that is malformed, nothing to quantize, weights, or states given twice.
    """

    targets: tuple[str, ...]
    weights: None = None
    input_activations: QuantizationArgs | None = None
    output_activations: QuantizationArgs | None = None
    query_states: QuantizationArgs | None = None
    key_states: QuantizationArgs | None = None
    value_states: QuantizationArgs | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "targets", read_strings(self.targets, "targets"))
        if not self.targets:
            raise ConfigError("targets is empty; name at least one module path, class name, re:… or role:…")
        check_targets(self.targets)
        if self.weights is not None:
            raise ConfigError("weights is refused until it is built: only activations and states are quantized")
        _check_args(self, (*_ACTIVATIONS, *_STATES))
        states = [key for key in _STATES if getattr(self, key) is not None]
        if self.input_activations is not None and states:
            raise ConfigError(
                f"input_activations and {', '.join(states)} are both given; on an attention module input_activations "
                "means all three states: give one or the other"
            )

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Self:
        """Read the JSON form; ``where`` is put in front of error messages.

        Raises:
            ConfigError: an unknown key, or values that ``QuantizationScheme`` or ``QuantizationArgs`` refuses.
        """
        given = read_mapping(data, "a quantization scheme", where)
        check_keys(given, _SCHEME_KEYS, where, tolerated=("format",))
        if given.get("format") not in (None, "dense"):
            with located(where):
                raise ConfigError(
                    f"format {given['format']!r} is not supported: leave it out, or set it null or 'dense'"
                )
        args = {key: _read_args(given.get(key), join(where, key)) for key in (*_ACTIVATIONS, *_STATES)}
        with located(where):
            return cls(targets=given.get("targets", ()), weights=given.get("weights"), **args)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; the three states, which compressed-tensors does not know, only where given."""
        data: dict[str, Any] = {"targets": list(self.targets), "weights": None}
        for key in (*_ACTIVATIONS, *_STATES):
            args: QuantizationArgs | None = getattr(self, key)
            if args is not None or key in _ACTIVATIONS:
                data[key] = None if args is None else args.to_dict()
        return data


@dataclass(frozen=True, kw_only=True)
class KVCacheScheme:
    """How the keys and the values of every attention layer are quantized where a cache would store them.

    Raises:
        ConfigError: neither is given.
    """

    key: QuantizationArgs | None = None
    value: QuantizationArgs | None = None

    def __post_init__(self) -> None:
        _check_args(self, _KV_KEYS)

    @classmethod
    def from_dict(cls, data: object, where: str = "") -> Self:
        """Read compressed-tensors' form (one set of arguments for both) or ours, ``{key: …, value: …}``.

        Raises:
            ConfigError: an unknown key, or values that ``QuantizationArgs`` refuses.
        """
        given = read_mapping(data, "a KV cache scheme", where)
        if not any(key in given for key in _KV_KEYS):
            both = QuantizationArgs.from_dict(given, where)
            return cls(key=both, value=both)
        check_keys(given, _KV_KEYS, where)
        args = {key: _read_args(given.get(key), join(where, key)) for key in _KV_KEYS}
        with located(where):
            return cls(**args)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: plain arguments where key and value are alike, ``{key: …, value: …}`` where not."""
        if self.key == self.value and self.key is not None:
            return self.key.to_dict()
        return {key: args.to_dict() for key in _KV_KEYS if (args := getattr(self, key)) is not None}


def _read_args(data: object, where: str) -> QuantizationArgs | None:
    return None if data is None else QuantizationArgs.from_dict(data, where)


def _check_args(owner: QuantizationScheme | KVCacheScheme, names: tuple[str, ...]) -> None:
    """Each of ``names`` must be QuantizationArgs or None, and one at least not None."""
    for name in names:
        value = getattr(owner, name)
        if value is not None and not isinstance(value, QuantizationArgs):
            kind = type(owner).__name__
            raise ConfigError(
                f"{name} must be QuantizationArgs, not {type(value).__name__}; {kind}.from_dict reads plain data"
            )
    if all(getattr(owner, name) is None for name in names):
        raise ConfigError(f"nothing to quantize: give at least one of {', '.join(names)}")
