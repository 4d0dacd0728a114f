"""What the finder returns: values that name nodes, and never hold them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tabulate import tabulate

from graphquant.numerics import TensorLayout

LETTERS = {"query": "q", "key": "k", "value": "v"}
STATES = tuple(f"{operand}_states" for operand in LETTERS)
OUTPUTS = tuple(f"{letter}_proj.output" for letter in LETTERS.values())
INPUTS = tuple(f"{letter}_proj.input" for letter in LETTERS.values())


@dataclass(frozen=True, kw_only=True)
class Site:
    """One tensor of one attention layer; ``node`` is the fx node that produces it."""

    key: str
    role: str
    node: str
    layout: TensorLayout
    layer: int
    attention: str
    module: str
    module_class: str
    source: str

    @property
    def where(self) -> str:
        """Site, node and source line, for errors."""
        return f"{self.key} (node {self.node}{', ' + self.source if self.source else ''})"


@dataclass(frozen=True, kw_only=True)
class AttentionLayer:
    """One matched attention core: ``core`` is its node, ``spelling`` how it is written (sdpa or softmax)."""

    index: int
    path: str
    module_class: str
    core: str
    spelling: str
    sites: tuple[Site, ...]

    def site(self, role: str) -> Site | None:
        """The layer's site of a role such as ``key_states`` or ``k_proj.output``."""
        return next((site for site in self.sites if site.role == role), None)


@dataclass(frozen=True, kw_only=True)
class NearMiss:
    """Something that looked like attention, or like one of its sites, and the deepest reason why it was not taken."""

    node: str
    path: str
    what: str
    reason: str
    source: str


@dataclass(frozen=True, kw_only=True)
class AttentionSites:
    """All attention of a program: matched layers in program order, near misses, and every module path for selectors."""

    layers: tuple[AttentionLayer, ...]
    near_misses: tuple[NearMiss, ...]
    modules: tuple[tuple[str, str], ...] = field(repr=False)

    def __iter__(self) -> Iterator[Site]:
        return (site for layer in self.layers for site in layer.sites)

    def __len__(self) -> int:
        return sum(len(layer.sites) for layer in self.layers)

    def __getitem__(self, key: str) -> Site:
        found = next((site for site in self if site.key == key), None)
        if found is None:
            first = next((f", from {site.key}" for site in self), "")
            raise KeyError(f"no site {key!r}; there are {len(self)}{first}")
        return found

    def rows(self) -> list[dict[str, object]]:
        """One row a site: layer, site, module, node, dims, source."""
        return [
            {
                "layer": site.layer,
                "site": site.key,
                "module": f"{site.module} ({site.module_class})",
                "node": site.node,
                "dims": site.layout.dims,
                "source": site.source,
            }
            for site in self
        ]

    def table(self, fmt: str = "simple") -> str:
        """The sites as a table, followed by the near misses."""
        parts = [tabulate(self.rows(), headers="keys", tablefmt=fmt)]
        parts.append(f"{len(self.layers)} attention layers, {len(self)} sites, {len(self.near_misses)} near misses")
        if self.near_misses:
            misses = [(miss.what, miss.path, miss.node, miss.reason, miss.source) for miss in self.near_misses]
            parts.append(tabulate(misses, headers=("near miss", "module", "node", "reason", "source"), tablefmt=fmt))
        return "\n\n".join(parts)

    def __str__(self) -> str:
        return self.table()
