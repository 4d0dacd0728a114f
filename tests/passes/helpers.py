"""Configurations, values at nodes, and the wiring of a graph, for the tests of prepare and convert."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg

import graphquant as gq
from tests.tiny import tiny_batches

PROJECTIONS = ("role:q_proj", "role:k_proj", "role:v_proj")
STATIC = ("tensor", "channel", "attn_head", "attn_head_channel", "group")
STRATEGIES = (*STATIC, "token")
HEADLESS = ("tensor", "channel", "group", "token")
"""Strategies that the input of a projection can take: it has no heads."""
PLACES = [(where, s) for where in ("states", "outputs") for s in STRATEGIES] + [("inputs", s) for s in HEADLESS]

FORMATS: dict[str, dict[str, Any]] = {
    f"{kind}{bits}-{'sym' if symmetric else 'asym'}": {"type": kind, "num_bits": bits, "symmetric": symmetric}
    for kind, bits in (("int", 2), ("int", 4), ("int", 8), ("uint", 8))
    for symmetric in (True, False)
} | {name: {"type": "float", "float_format": name} for name in ("e4m3", "e5m2")}


def args(strategy: str = "tensor", **changes: Any) -> gq.QuantizationArgs:
    """Arguments of a strategy, with groups of 4 channels."""
    size = {"group_size": 4} if strategy == "group" else {}
    return gq.QuantizationArgs(strategy=strategy, **size | changes)


def config(
    where: str, query: gq.QuantizationArgs, key: gq.QuantizationArgs | None = None, value: Any = None
) -> gq.QuantizationConfig:
    """Quantize states, outputs or inputs with one set of arguments, or with a set for each of q, k and v."""
    each = dict(zip("qkv", (query, key or query, value or query), strict=True))
    if where == "states":
        names = {"q": "query_states", "k": "key_states", "v": "value_states"}
        states: Any = {names[letter]: given for letter, given in each.items()}
        return gq.QuantizationConfig(
            config_groups={"states": gq.QuantizationScheme(targets=("role:attention",), **states)}
        )
    field = {"outputs": "output_activations", "inputs": "input_activations"}[where]
    groups = {}
    for letter, given in each.items():
        activations: Any = {field: given}
        groups[letter] = gq.QuantizationScheme(targets=(f"role:{letter}_proj",), **activations)
    return gq.QuantizationConfig(config_groups=groups)


def both(*configs: gq.QuantizationConfig) -> gq.QuantizationConfig:
    """All groups of several configurations."""
    groups = {f"{i}.{name}": group for i, c in enumerate(configs) for name, group in c.config_groups.items()}
    return gq.QuantizationConfig(config_groups=groups)


def calibrated(
    program: ExportedProgram, c: gq.QuantizationConfig, batches: Iterable[Mapping[str, Tensor]] | None = None
) -> GraphModule:
    """A prepared module that has seen the tiny batches."""
    prepared = gq.prepare(program, c)
    gq.calibrate(prepared, tiny_batches() if batches is None else batches, progress=False)
    return prepared


def assert_converts_exactly(
    prepared: GraphModule, batches: Iterable[Mapping[str, Tensor]], dialects: Iterable[str] = ("pt2e", "aten")
) -> None:
    """The converted program's outputs are the prepared module's fake-quantized ones, bit for bit and in their dtype."""
    gq.set_mode(prepared, "fake_quant")
    with torch.no_grad():
        for dialect in dialects:
            quantized = gq.convert(prepared, dialect=dialect)
            for batch in batches:
                assert_same(run(quantized, batch), prepared(**batch))


def assert_same(left: Any, right: Any) -> None:
    """Two results of one structure, bit for bit and dtype for dtype."""
    lefts, left_spec = torch.utils._pytree.tree_flatten(left)
    rights, right_spec = torch.utils._pytree.tree_flatten(right)
    assert left_spec == right_spec
    for a, b in zip(lefts, rights, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def sites_of(program: ExportedProgram, c: gq.QuantizationConfig) -> list[Any]:
    """The planned sites of a configuration."""
    from graphquant.plan import make_plan

    return list(make_plan(gq.find_attention(program), c))


class _Visitor(Interpreter):
    """Passes the values of some nodes, by name, through a function on their way."""

    def __init__(self, program: ExportedProgram, at: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__(program.graph_module)
        self.at = at

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        return self.at[n.name](value) if n.name in self.at else value


def run(
    program: ExportedProgram, batch: Mapping[str, Tensor], at: Mapping[str, Callable[[Tensor], Tensor]] | None = None
) -> Any:
    """A program's result, node by node: cheaper than ``program.module()``, and open to a look at nodes ``at`` work."""
    tensors = program.constants | program.state_dict
    inputs = iter(batch.values())
    specs = program.graph_signature.input_specs
    values = [next(inputs) if spec.target is None else tensors[spec.target] for spec in specs]
    with torch.no_grad():
        results = _Visitor(program, at or {}).run(*values)
    return torch.utils._pytree.tree_unflatten(results, program.call_spec.out_spec)


def values_at(program: ExportedProgram, names: Iterable[str], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of some nodes, by name."""
    seen: dict[str, Tensor] = {}

    def keeping(name: str) -> Callable[[Tensor], Tensor]:
        return lambda value: seen.setdefault(name, value)

    run(program, batch, {name: keeping(name) for name in names})
    return seen


def wiring(graph: Graph, names: Iterable[str], alias: Mapping[str, str]) -> list[tuple[Any, ...]]:
    """Name, op and arguments of the calls called ``names``, in order, other nodes' names replaced by ``alias``."""
    wanted = set(names)
    return [
        (node.name, str(node.target), *map_arg((node.args, node.kwargs), lambda n: alias.get(n.name, n.name)))
        for node in graph.nodes
        if node.op == "call_function" and node.name in wanted
    ]


def call_names(program: ExportedProgram) -> list[str]:
    """Names of all calls of a program."""
    return [node.name for node in program.graph.nodes if node.op == "call_function"]
