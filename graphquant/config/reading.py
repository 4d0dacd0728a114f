"""Reading plain data with errors that say where: a dotted path, what was expected, what was found, the closest name.

``where`` is the path of the value being read, "" at the top; every ``from_dict`` of this package takes one.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, TypeVar

from graphquant.errors import ConfigError

V_co = TypeVar("V_co", covariant=True)


class FrozenMap(Mapping[str, V_co]):
    """A read-only mapping that hashes by its items, so that a frozen dataclass holding one is a value."""

    # types.MappingProxyType would do, but it neither hashes (before 3.12) nor pickles nor deep-copies.
    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V_co]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> V_co:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)


def join(where: str, key: str) -> str:
    """The dotted path of ``key`` inside ``where``."""
    return f"{where}.{key}" if where else key


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put ``where`` in front of the message of a ConfigError, whose class is kept."""
    try:
        yield
    except ConfigError as error:
        if not where:
            raise
        raise type(error)(f"{where}: {error}") from None


def did_you_mean(name: object, known: Collection[str], cutoff: float = 0.6) -> str:
    """``"; did you mean 'x'?"`` with the closest known name, or nothing."""
    close = get_close_matches(str(name), known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]!r}?" if close else ""


def read_mapping(value: object, what: str, where: str) -> dict[str, Any]:
    """A copy of ``value``, which must be a mapping with string keys.

    Raises:
        ConfigError: it is not one.
    """
    with located(where):
        if not isinstance(value, Mapping):
            raise ConfigError(f"expected a mapping ({what}), found {type(value).__name__} {value!r}")
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"expected string keys ({what}), found {type(key).__name__} {key!r}; quote it")
    return dict(value)


def read_strings(value: object, what: str) -> tuple[str, ...]:
    """``value`` as a tuple of strings; a single string stands for itself.

    Raises:
        ConfigError: it is neither a string nor a list of strings.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{what} must be a string or a list of strings, not {value!r}")
    return tuple(value)


def check_keys(data: Mapping[str, Any], known: Collection[str], where: str, tolerated: Collection[str] = ()) -> None:
    """Refuse a key that is neither known nor ``tolerated`` (read, but not worth offering).

    Raises:
        ConfigError: naming the key, the closest known one and all of them.
    """
    for key in data:
        if key not in known and key not in tolerated:
            guess = did_you_mean(key, [*known, *tolerated])
            with located(where):
                raise ConfigError(f"unknown key {key!r}{guess} (known: {', '.join(known)})")
