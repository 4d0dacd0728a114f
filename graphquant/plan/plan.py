"""The plan: site → arguments. It names nodes and never holds them, so it prints, compares and serialises."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate

from graphquant.config import QuantizationArgs, QuantizationConfig
from graphquant.errors import ConfigError, NoAttentionError, SelectorError
from graphquant.graph import AttentionSites, Site
from graphquant.numerics import TensorLayout, check_strategy
from graphquant.observers import Observer, make_observer
from graphquant.observers.base import Grain
from graphquant.plan.selectors import choose, ignored_sites


@dataclass(frozen=True, kw_only=True)
class PlannedSite:
    """One tensor to quantize and how; ``keys`` are all the sites that are this same tensor, its own key first."""

    site: Site
    args: QuantizationArgs
    keys: tuple[str, ...]

    @property
    def key(self) -> str:
        """The name of the tensor's statistics and qparams."""
        return self.keys[0]

    @property
    def layout(self) -> TensorLayout:
        """Where heads and channels lie."""
        return self.site.layout

    @property
    def grain(self) -> Grain:
        """What shares a scale; a dynamic site is observed as one tensor, for its report only."""
        strategy = "tensor" if self.args.dynamic else self.args.strategy
        return Grain(self.layout, strategy, self.args.group_size)

    @property
    def scale_shape(self) -> str:
        """Shape of the scale, symbols for the dims of a dynamic one."""
        if self.args.dynamic:
            dims = self.layout.dims.strip("[]").split(", ")
            return f"[{', '.join([*dims[:-1], '1'])}]"
        return str(list(self.grain.shape))

    def observer(self) -> Observer:
        """A fresh observer as configured."""
        return make_observer(self.args.observer, self.args.observer_kwargs)


@dataclass(frozen=True, kw_only=True)
class QuantizationPlan:
    """What will be quantized, and how much of the program that is."""

    sites: tuple[PlannedSite, ...]
    found: int
    ignored: int
    near_misses: int

    def __iter__(self) -> Iterator[PlannedSite]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def rows(self) -> list[dict[str, Any]]:
        """One row a planned tensor: layer, site, node, how, observer, scale shape."""
        return [
            {
                "layer": planned.site.layer,
                "site": planned.key,
                "node": planned.site.node,
                "dims": planned.layout.dims,
                "quantized as": planned.args.summary(),
                "observer": "" if planned.args.dynamic else planned.args.observer,
                "scale": planned.scale_shape,
            }
            for planned in self.sites
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "sites": [row | {"args": p.args.to_dict()} for row, p in zip(self.rows(), self.sites, strict=True)],
            "coverage": self.coverage(),
        }

    def coverage(self) -> dict[str, int]:
        """Tensors quantized, and of the sites found how many: selected, ignored, near misses."""
        selected = sum(len(planned.keys) for planned in self.sites)
        return {
            "tensors": len(self.sites),
            "sites": selected,
            "found": self.found,
            "ignored": self.ignored,
            "near_misses": self.near_misses,
        }

    def table(self, fmt: str = "simple") -> str:
        """The plan as a table."""
        return tabulate(self.rows(), headers="keys", tablefmt=fmt)

    def __str__(self) -> str:
        return self.table()


def check_config(config: object) -> None:
    """Refuse anything but a QuantizationConfig, before any work is done for it.

    Raises:
        ConfigError: saying how to make one.
    """
    if not isinstance(config, QuantizationConfig):
        raise ConfigError(
            f"expected a QuantizationConfig, found {type(config).__name__}; make one with "
            "QuantizationConfig.from_dict, from_recipe, or preset(name)"
        )


def make_plan(sites: AttentionSites, config: QuantizationConfig) -> QuantizationPlan:
    """Decide for every site of a program whether and how it is quantized.

    Raises:
        NoAttentionError: the program has no matched attention.
        SelectorError: a selector that selects nothing, contradictory groups, or nothing left to quantize.
        StrategyError: a strategy that a selected site cannot take.
    """
    require_attention(sites)
    ignored = ignored_sites(sites, config.ignore)
    choices = choose(sites, config, ignored)
    kept = [site for site in sites if site.key in choices and site.key not in ignored]
    if not kept:
        raise SelectorError(f"all {len(choices)} selected sites are ignored; nothing is left to quantize")
    _check_whole_tensors(sites, kept)
    for site in kept:
        check_strategy(site.layout, choices[site.key].args.strategy, choices[site.key].args.group_size, site.where)
    planned = [_merge(group, {site.key: choices[site.key].args for site in group}) for group in _by_tensor(kept)]
    return QuantizationPlan(
        sites=tuple(planned),
        found=len(sites),
        ignored=sum(site.key in choices for site in sites if site.key in ignored),
        near_misses=len(sites.near_misses),
    )


def require_attention(sites: AttentionSites) -> None:
    """Refuse a program without attention, with the reasons of its near misses.

    Raises:
        NoAttentionError: no layer was matched.
    """
    if sites.layers:
        return
    misses = "; ".join(f"{m.node} ({m.source or 'no source line'}): {m.reason}" for m in sites.near_misses[:3])
    raise NoAttentionError(
        "no attention core, softmax(Q·Kᵀ)·V, was matched in the program"
        + (f"; {len(sites.near_misses)} near misses: {misses}" if misses else "; it has no sdpa op and no softmax")
    )


def _check_whole_tensors(sites: AttentionSites, kept: list[Site]) -> None:
    """Refuse to quantize a tensor for one of its sites and not for another: the graph has it once."""
    planned: dict[tuple[str, TensorLayout], Site] = {}
    for site in kept:
        planned.setdefault((site.node, site.layout), site)
    chosen = {site.key for site in kept}
    for site in sites:
        if site.role.endswith(".input"):
            continue  # one projection may read the quantized tensor and another the original
        twin = planned.get((site.node, site.layout))
        if twin is not None and site.key not in chosen:
            raise SelectorError(
                f"{twin.key} and {site.key} are one tensor (node {site.node}), and only the first is selected: "
                "select both, or ignore both"
            )


def _by_tensor(sites: Iterable[Site]) -> Iterable[list[Site]]:
    """Group the sites that are one tensor: it gets one observer and one scale."""
    groups: dict[tuple[str, TensorLayout], list[Site]] = {}
    for site in sites:
        groups.setdefault((site.node, site.layout), []).append(site)
    return groups.values()


def _merge(group: list[Site], args: dict[str, QuantizationArgs]) -> PlannedSite:
    first = group[0]
    for site in group[1:]:
        if args[site.key] != args[first.key]:
            raise SelectorError(
                f"{first.key} and {site.key} are one tensor (node {first.node}) and are given "
                f"{args[first.key].summary()} and {args[site.key].summary()}: give them the same arguments"
            )
    return PlannedSite(site=first, args=args[first.key], keys=tuple(site.key for site in group))
