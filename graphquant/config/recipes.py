"""llm-compressor recipes: YAML files in which one QuantizationModifier holds the configuration.

Read in any of these forms, a list of modifiers standing wherever a mapping of them may::

    quant_stage: {quant_modifiers: {QuantizationModifier: {config_groups: …, ignore: …, kv_cache_scheme: …}}}
    quant_modifiers: {QuantizationModifier: …}
    QuantizationModifier: …
    config_groups: …
"""

import os
import secrets
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from graphquant.config.reading import check_keys, did_you_mean, join, located, read_mapping
from graphquant.config.scheme import QuantizationScheme
from graphquant.errors import ConfigError, OutputError

MODIFIER = "QuantizationModifier"
_KEYS = ("config_groups", "ignore", "kv_cache_scheme")
_SHORTHAND = ("scheme", "targets")
_TOP_LEVEL = ("quant_stage", "quant_modifiers", MODIFIER, *_KEYS)


@dataclass(frozen=True)
class Recipe:
    """The body of a recipe's QuantizationModifier, and its dotted path inside the file."""

    modifier: dict[str, Any]
    where: str


def read_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Find the one QuantizationModifier of a recipe file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds something else; the message leaves out its name.
    """
    data = _load_yaml(Path(path))
    if data is None:
        raise ConfigError("the file is empty; a recipe has a stage, a modifier or config_groups")
    top = read_mapping(data, "a recipe", "")
    found = list(_modifiers_of_file(top))
    if not found:
        raise ConfigError(f"there is no {MODIFIER}; put config_groups or kv_cache_scheme into one")
    if len(found) > 1:
        raise ConfigError(f"{len(found)} {MODIFIER}s, at {' and '.join(where for where, _ in found)}; keep one")
    where, body = found[0]
    modifier = read_mapping(body, f"a {MODIFIER}", where)
    check_keys(modifier, _KEYS, where, tolerated=_SHORTHAND)
    return Recipe(_expand_shorthand(modifier, where), where)


def write_recipe(path: str | os.PathLike[str], modifier: dict[str, Any]) -> None:
    """Write the staged form, all or nothing: a reader sees the old file or the new one, never half of it.

    Raises:
        OutputError: the folder is missing or cannot be written to, or ``path`` is a folder.
    """
    target = Path(path)
    recipe = {"quant_stage": {"quant_modifiers": {MODIFIER: modifier}}}
    # Not allow_unicode: PyYAML then writes a line break such as \x85 in a way that it reads back as a space.
    text = yaml.safe_dump(recipe, sort_keys=False, width=120)
    # Not tempfile: its files are readable by their owner alone, and os.replace would keep that.
    temporary = target.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        no_folder = isinstance(error, FileNotFoundError)
        reason = f"there is no folder {target.parent}; create it first" if no_folder else error.strerror
        raise OutputError(f"cannot write {target}: {reason}") from error


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader, except that a repeated key is an error: YAML would drop the first of two groups in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is repeated", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _load_yaml(path: Path) -> object:
    """The document in a file, read with the safe loader.

    Raises:
        ConfigError: it is missing, unreadable, or not YAML (naming the line).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("no such file") from None
    except OSError as error:
        raise ConfigError(f"cannot be read as a recipe: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text: {error.reason} at byte {error.start}") from None
    try:
        # Safe: the loader is a SafeLoader, which builds plain values only.
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(f"invalid YAML{line}: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # ValueError: a date such as 2024-13-01; RecursionError: a thousand nested brackets.
        raise ConfigError(f"invalid YAML: {' '.join(str(error).split())}") from None


def _modifiers_of_file(top: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """Path and body of every QuantizationModifier in a recipe, whatever its form."""
    if any(key in (*_KEYS, *_SHORTHAND) for key in top):
        yield "", top
        return
    for key, value in top.items():
        if key.endswith("stage"):
            for name, modifiers in read_mapping(value, "a stage", key).items():
                if not name.endswith("modifiers"):
                    check_keys({name: modifiers}, ("quant_modifiers",), key)
                yield from _modifiers_in(modifiers, join(key, name))
        elif key.endswith("modifiers"):
            yield from _modifiers_in(value, key)
        elif key.endswith("Modifier"):
            yield from _modifiers_in({key: value}, "")
        else:
            check_keys({key: value}, _TOP_LEVEL, "")


def _modifiers_in(value: object, where: str) -> Iterator[tuple[str, object]]:
    """Path and body of each QuantizationModifier in a mapping of modifiers, or in a list of such mappings."""
    for index, entry in enumerate(value if isinstance(value, list) else [value]):
        at = f"{where}[{index}]" if isinstance(value, list) else where
        for name, body in read_mapping(entry, "modifiers by name", at).items():
            if name != MODIFIER:
                # 0.85: SmoothQuantModifier is no misspelling of it.
                guess = did_you_mean(name, [MODIFIER], cutoff=0.85)
                with located(at):
                    raise ConfigError(f"{name} is not supported{guess} (known: {MODIFIER}); remove it from the recipe")
            yield join(at, name), body


def _expand_shorthand(modifier: dict[str, Any], where: str) -> dict[str, Any]:
    """Make one config group of llm-compressor's ``targets`` and ``scheme`` (a scheme without its targets).

    Raises:
        ConfigError: the scheme is the name of a preset, or stands beside config_groups or without targets.
    """
    scheme, targets = modifier.pop("scheme", None), modifier.pop("targets", None)
    with located(where):
        if scheme is None:
            # Linear is its default, which llm-compressor writes into the recipes it saves; alone it selects nothing.
            if targets not in (None, "Linear", ["Linear"]):
                raise ConfigError(f"targets {targets!r} has no scheme beside it; move it into one of the config_groups")
            return modifier
        if _names_presets(scheme):
            raise ConfigError(
                f"scheme {scheme!r} is a preset of llm-compressor that quantizes weights, which are not built; write "
                "config_groups with input_activations or output_activations instead"
            )
        if modifier.get("config_groups") is not None:
            raise ConfigError("scheme and config_groups are both given; keep config_groups")
        if targets is None or "targets" in scheme:
            raise ConfigError("scheme needs targets, beside it and not inside it")
    # Read here already, so that an error has the path that stands in the file.
    group = QuantizationScheme.from_dict({**scheme, "targets": targets}, join(where, "scheme"))
    return {**modifier, "config_groups": {"group_0": group.to_dict()}}


def _names_presets(scheme: object) -> bool:
    """Whether a scheme is a preset's name, or maps such names to targets, rather than holding arguments."""
    if not isinstance(scheme, dict):
        return True
    return any(isinstance(value, str | list) for key, value in scheme.items() if key not in ("format", "targets"))
