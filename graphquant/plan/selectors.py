"""Which sites a target, an ignore entry or the KV-cache scheme selects.

A target selects modules: an attention module for its states, a q/k/v linear for its input and output. An ignore entry
selects a module with all that lies below it. Priority where several groups select one site: exact path, then role,
then regular expression, then class name; the KV-cache scheme counts as a role.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from graphquant.config import QuantizationArgs, QuantizationConfig, QuantizationScheme
from graphquant.errors import SelectorError
from graphquant.graph import AttentionSites, Site

EXACT, ROLE, REGEX, CLASS = range(4)
_STATES_FIELDS = ("query_states", "key_states", "value_states")


@dataclass(frozen=True)
class Choice:
    """One group's wish for one site."""

    group: str
    priority: int
    args: QuantizationArgs


def choose(sites: AttentionSites, config: QuantizationConfig, ignored: frozenset[str]) -> dict[str, Choice]:
    """The winning wish for every selected site, by site key; sites that are ignored may be wished for as one likes.

    Raises:
        SelectorError: a target or field that selects nothing, or two wishes of one priority that differ.
    """
    wishes: dict[str, list[Choice]] = {}
    for name, scheme in config.config_groups.items():
        for key, choice in _group_wishes(sites, name, scheme).items():
            wishes.setdefault(key, []).append(choice)
    kv = config.kv_cache_scheme
    for role, args in (("key_states", kv.key), ("value_states", kv.value)) if kv else ():
        if args is not None:
            for site in _one_a_layer(sites, role, ignored):
                wishes.setdefault(site.key, []).append(Choice("kv_cache_scheme", ROLE, args))
    return {key: choices[0] if key in ignored else _winner(key, choices) for key, choices in wishes.items()}


def _one_a_layer(sites: AttentionSites, role: str, ignored: frozenset[str]) -> Iterable[Site]:
    """The site of a role in every layer; a layer without it must be ignored, or a cache would be half quantized."""
    for layer in sites.layers:
        site = layer.site(role)
        if site is not None:
            yield site
        elif not all(other.key in ignored for other in layer.sites):
            misses = (m for m in sites.near_misses if m.what == role)
            reasons = [m.reason for m in misses if f"{m.path}.".startswith(f"{layer.path}.")]
            raise SelectorError(
                f"kv_cache_scheme wants the {role} of every layer, and {layer.path} has none that was matched"
                f"{': ' + reasons[0] if reasons else ''}; leave the layer out with ignore: [{layer.path}]"
            )


def _winner(key: str, choices: list[Choice]) -> Choice:
    best = min(choice.priority for choice in choices)
    first, *others = (choice for choice in choices if choice.priority == best)
    for other in others:
        if other.args != first.args:
            raise SelectorError(
                f"{key} is given {first.args.summary()} by {first.group} and {other.args.summary()} by {other.group}, "
                "with equal priority: narrow the targets of one of them"
            )
    return first


def _group_wishes(sites: AttentionSites, name: str, scheme: QuantizationScheme) -> dict[str, Choice]:
    wishes: dict[str, Choice] = {}
    used: set[str] = set()
    for target in scheme.targets:
        selected = 0
        for site in sites:
            priority = _priority(target, site)
            if priority is None:
                continue
            for field, args in _wanted(scheme, site):
                used.add(field)
                selected += 1
                held = wishes.get(site.key)
                if held is None or priority < held.priority:
                    wishes[site.key] = Choice(f"group {name!r}", priority, args)
        if not selected:
            raise SelectorError(_selects_nothing(target, name, sites))
    given = [f for f in ("input_activations", "output_activations", *_STATES_FIELDS) if getattr(scheme, f) is not None]
    idle = [field for field in given if field not in used]
    if idle:
        raise SelectorError(
            f"group {name!r}: {', '.join(idle)} applies to nothing that its targets {list(scheme.targets)} select; "
            "attention modules take input_activations, query_states, key_states and value_states, q/k/v linears take "
            "input_activations and output_activations"
        )
    return wishes


def _wanted(scheme: QuantizationScheme, site: Site) -> Iterable[tuple[str, QuantizationArgs]]:
    fields: tuple[str, ...] = ("input_activations",)
    if site.role.endswith("_states"):
        fields = ("input_activations", site.role)
    elif site.role.endswith(".output"):
        fields = ("output_activations",)
    for field in fields:
        args = getattr(scheme, field)
        if args is not None:
            yield field, args


def _owner(site: Site) -> tuple[str, str]:
    return site.module, site.module_class


def _priority(target: str, site: Site) -> int | None:
    """How exactly a target names the module that owns a site, or None."""
    path, cls = _owner(site)
    if target.startswith("role:"):
        role = target.removeprefix("role:")
        return ROLE if site.role.startswith(f"{role}.") or (role == "attention" and "_states" in site.role) else None
    if target.startswith("re:"):
        return REGEX if re.match(target.removeprefix("re:"), path) else None
    if target == path:
        return EXACT
    return CLASS if target == cls else None


def ignored_sites(sites: AttentionSites, ignore: Iterable[str]) -> frozenset[str]:
    """Keys of the sites at or below a module that an ignore entry names by path, regular expression, class or role.

    Raises:
        SelectorError: an entry that names no module of the program.
    """
    classes = dict(sites.modules)
    ignored: set[str] = set()
    for entry in ignore:
        modules = {path for path, cls in sites.modules if _names(entry, path, cls)}
        keys = {site.key for site in sites if _names(entry, site.key, "") or _ignores(entry, site, modules, classes)}
        if not keys and not modules:
            raise SelectorError(
                f"ignore entry {entry!r} names no module of the program; {_what_there_is(sites)}, and "
                f"{len(sites.modules)} modules in all"
            )
        ignored |= keys
    return frozenset(ignored)


def _names(entry: str, path: str, cls: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), path) is not None
    return entry in (path, cls)


def _ignores(entry: str, site: Site, modules: set[str], classes: Mapping[str, str]) -> bool:
    if entry.startswith("role:"):
        return _priority(entry, site) is not None
    parts = site.module.split(".")
    return any(".".join(parts[: depth + 1]) in modules for depth in range(len(parts)))


def _selects_nothing(target: str, group: str, sites: AttentionSites) -> str:
    others = [path for path, cls in sites.modules if _names(target, path, cls)]
    owners = {site.module for site in sites}
    if any(path in owners for path in others):
        reason = "selects modules that this group gives nothing to"
    elif others:
        reason = f"matches {len(others)} modules ({_pattern(others[0])}), none of them attention or a q/k/v linear"
    else:
        reason = "selects nothing"
    return f"group {group!r}: target {target!r} {reason}; {_what_there_is(sites)}"


def _what_there_is(sites: AttentionSites) -> str:
    """The selectable modules, layer numbers folded: one line, however deep the model."""
    owners = dict.fromkeys(f"{_pattern(path)} ({cls})" for path, cls in map(_owner, sites))
    return f"there are {', '.join(owners)}"


def _pattern(path: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)
