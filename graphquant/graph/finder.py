"""``find_attention``: from each core back to its states and its projections, as values that name nodes."""

from collections import Counter

from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from graphquant.graph import ops
from graphquant.graph.core import Core, NoCore, find_cores, hidden_cores
from graphquant.graph.layout_walk import states_layout, states_place, walk
from graphquant.graph.products import Operand
from graphquant.graph.projection import NoProjection, Projection, find_projection
from graphquant.graph.shapes import shape, show, static
from graphquant.graph.sites import LETTERS, AttentionLayer, AttentionSites, NearMiss, Site
from graphquant.numerics import TensorLayout


def find_attention(program: ExportedProgram) -> AttentionSites:
    """Find every attention core of a program and the sites around it, by dataflow alone.

    Returns the matched layers in program order, and a near miss with its reason for everything that looked like
    attention and was not matched. The program is not changed.
    """
    inputs = frozenset(name for name in program.graph_signature.user_inputs if isinstance(name, str))
    return _Finder(program.graph_module, inputs).run()


def find_attention_in(module: GraphModule) -> AttentionSites:
    """``find_attention`` of a GraphModule, such as ``program.module()``, whose weights are attributes of its own."""
    return _Finder(module, frozenset(node.name for node in module.graph.nodes if node.op == "placeholder")).run()


class _Finder:
    """One search: collects layers, near misses and the paths already taken."""

    def __init__(self, module: GraphModule, inputs: frozenset[str]) -> None:
        self.module, self.graph = module, module.graph
        self.inputs = inputs
        self.layers: list[AttentionLayer] = []
        self.misses: list[NearMiss] = []
        self.paths: Counter[str] = Counter()

    def run(self) -> AttentionSites:
        for match in find_cores(self.graph, self.inputs):
            if isinstance(match, NoCore):
                self._miss(match.anchor, "attention core", match.reason)
            else:
                self._layer(match)
        for caller, anchor in hidden_cores(self.module, self.inputs):
            self._miss(
                caller,
                "attention core",
                f"{anchor.name} is inside of the subgraph of {ops.op_name(caller)}; expected it in the graph itself: "
                "capture the model without autocast and grad modes inside of it, or run_decompositions()",
            )
        return AttentionSites(layers=tuple(self.layers), near_misses=tuple(self.misses), modules=_modules(self.graph))

    def _miss(self, node: Node, what: str, reason: str) -> None:
        frames = ops.stack(node)
        path = frames[-1][0] if frames else ""
        self.misses.append(NearMiss(node=node.name, path=path, what=what, reason=reason, source=ops.source_line(node)))

    def _layer(self, core: Core) -> None:
        operands = {"query": core.query, "key": core.key, "value": core.value}
        states = {name: self._states(name, operand) for name, operand in operands.items()}
        if not any(states.values()):
            return
        projections = {name: self._projection(name, *found) for name, found in states.items() if found is not None}
        path, module = self._attention_module(core, projections.get("query"))
        index = len(self.layers)
        sites: list[Site] = []
        for name, found in states.items():
            if found is None:
                continue
            node, layout = found
            sites.append(_site(f"{name}_states", node, layout, module, index, path))
            projection = projections[name]
            if projection is not None:
                sites += _projection_sites(name, projection, layout, path, index)
        order = ("input", "output", "states")
        sites.sort(key=lambda site: order.index(site.role.replace("_", ".").rsplit(".", 1)[-1]))
        self.layers.append(
            AttentionLayer(
                index=index,
                path=path,
                module_class=module[1],
                core=core.anchor.name,
                spelling=core.spelling,
                sites=tuple(sites),
            )
        )

    def _states(self, name: str, operand: Operand) -> tuple[Node, TensorLayout] | None:
        if not operand.labels or len(operand.labels) != len(shape(operand.node)):
            self._miss(operand.node, f"{name}_states", f"{operand.node.name} has shape {show(shape(operand.node))}")
            return None
        places, stop = walk(operand.node, operand.labels)
        place = None if stop.refused else states_place(places)
        layout = None if place is None else states_layout(place)
        if place is None or layout is None:
            self._miss(
                stop.node, f"{name}_states", f"{stop.reason}; expected to reach {name} states [B, H, S, D] before it"
            )
            return None
        return place.node, layout

    def _projection(self, name: str, states: Node, layout: TensorLayout) -> Projection | None:
        found = find_projection(states, layout.heads, layout.head_dim, self.inputs)
        missing = found if isinstance(found, NoProjection) else found.output
        if isinstance(missing, NoProjection):
            self._miss(missing.node, f"{LETTERS[name]}_proj", missing.reason)
        return None if isinstance(found, NoProjection) else found

    def _attention_module(self, core: Core, query: Projection | None) -> tuple[str, tuple[str, str]]:
        """The layer's name, and the innermost module around both the core and the query's linear.

        A path is made up where there is no module, and a module called several times names each call apart.
        """
        frames = ops.stack(core.anchor)
        if query is not None:
            around = {path for path, _ in ops.stack(query.matmul)}
            frames = [frame for frame in frames if frame[0] in around]
        path, cls = frames[-1] if frames else ("", "")
        path = path or f"attention_{len(self.layers)}"
        self.paths[path] += 1
        name = path if self.paths[path] == 1 else f"{path}#{self.paths[path]}"
        return name, (path, cls)


def _projection_sites(
    name: str, projection: Projection, states: TensorLayout, attention: str, layer: int
) -> list[Site]:
    letter = LETTERS[name]
    frames = ops.stack(projection.matmul)
    module = frames[-1] if frames else (f"{attention}.{letter}_proj", "")
    sites = []
    width = static(shape(projection.input)[-1])
    if width is not None and len(shape(projection.input)) == 3:
        layout = TensorLayout("features", 1, width)
        sites.append(_site(f"{letter}_proj.input", projection.input, layout, module, layer, attention))
    if isinstance(projection.output, Node):
        layout = TensorLayout("projection", states.heads, states.head_dim)
        sites.append(_site(f"{letter}_proj.output", projection.output, layout, module, layer, attention))
    return sites


def _site(role: str, node: Node, layout: TensorLayout, module: tuple[str, str], layer: int, attention: str) -> Site:
    return Site(
        key=f"{attention}.{role}",
        role=role,
        node=node.name,
        layout=layout,
        layer=layer,
        attention=attention,
        module=module[0],
        module_class=module[1],
        source=ops.source_line(node),
    )


def _modules(graph: Graph) -> tuple[tuple[str, str], ...]:
    """Every module path and class that the graph's nodes came from, for selectors and their error messages."""
    seen: dict[str, str] = {}
    for node in graph.nodes:
        seen.update((path, cls) for path, cls in ops.stack(node) if path)
    return tuple(seen.items())
