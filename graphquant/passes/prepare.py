"""``prepare``: the program as a GraphModule, with an observer and a fake-quant module at every planned site."""

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from graphquant.capture import capture
from graphquant.config import QuantizationConfig
from graphquant.errors import ConfigError, ConvertError
from graphquant.graph import find_attention
from graphquant.passes.modules import SiteFakeQuant, SiteObserver
from graphquant.passes.placing import insertion_point, readers, refuse_in_place
from graphquant.passes.prepared import Origin, attach, is_prepared, set_mode
from graphquant.passes.unlift import Unlifted
from graphquant.plan import PlannedSite, check_config, make_plan
from graphquant.records import node_name, refuse_converted

_DEFAULT_MASK = "attention_mask"


def prepare(
    model: nn.Module | ExportedProgram, config: QuantizationConfig, *, padding_mask: str | None = _DEFAULT_MASK
) -> GraphModule:
    """Insert observers and fake-quant at the sites that ``config`` selects; the result observes, and changes no value.

    ``padding_mask`` names the program's input ``[B, T]`` in which 0 marks padding; padding never counts. A program
    without an ``attention_mask`` counts every position. Weights are shared with the program, buffers are copies.

    Raises:
        CaptureError, NoAttentionError, SelectorError, StrategyError: see ``capture`` and ``make_plan``.
        ConfigError: the config is no QuantizationConfig, or the mask is not 2-D or not there.
        ConvertError: the module is prepared or the program converted already, or a site cannot be rewritten.
    """
    check_config(config)
    if isinstance(model, nn.Module) and is_prepared(model):
        raise ConvertError("this module is prepared already: give prepare the model or program that it was made of")
    program = capture(model)
    refuse_converted(program)
    sites = find_attention(program)
    plan = make_plan(sites, config)
    unlifted = Unlifted(program)
    mask = _mask_node(unlifted.graph, padding_mask)
    nodes = {node.name: node for node in unlifted.graph.nodes}
    for planned in plan:
        node = nodes[planned.site.node]
        refuse_in_place(node, planned)
        _insert(unlifted, node, readers(node, planned, sites, nodes), planned, mask)
    prepared = unlifted.finish()
    attach(prepared, Origin(program, sites, plan))
    set_mode(prepared, "observe")
    return prepared


def _mask_node(graph: Graph, name: str | None) -> Node | None:
    """The placeholder of the padding mask, or None where the program has none of that name."""
    inputs: dict[str, Node] = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    if name is not None and name not in inputs and name != _DEFAULT_MASK:
        raise ConfigError(
            f"the program has no input {name!r} that could be the padding mask; it has {', '.join(inputs)}"
        )
    node = inputs.get(name or "")
    nested = [other for other in inputs if name == _DEFAULT_MASK and node is None and other.endswith(_DEFAULT_MASK)]
    if nested:
        raise ConfigError(
            f"is the input {nested[0]!r} the padding mask? Then give padding_mask={nested[0]!r}; else give "
            "padding_mask=None, which counts every position"
        )
    if node is None or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if node.meta["val"].dim() != 2:
        raise ConfigError(
            f"padding mask {name!r} has {node.meta['val'].dim()} dims; expected [B, T] with 0 for padding. Give "
            "padding_mask=None to count every position, padding included"
        )
    return node


def _insert(unlifted: Unlifted, node: Node, users: list[Node], planned: PlannedSite, mask: Node | None) -> None:
    name = node_name(planned.key)
    device = node.meta["val"].device
    point, last = insertion_point(node), node
    for suffix, module in (("observer", SiteObserver(planned)), ("fake_quant", SiteFakeQuant(planned))):
        target = f"graphquant_{suffix}s.{name}"
        if target in unlifted.attributes:
            raise ConvertError(f"{planned.site.where}: another site is called {name} too; rename one of the modules")
        unlifted.attributes[target] = module.to(device)
        args = (last,) if mask is None else (last, mask)
        with unlifted.graph.inserting_after(point):
            point = last = unlifted.graph.create_node("call_module", target, args, name=f"{name}_{suffix}")
        last.meta = {key: value for key, value in node.meta.items() if key != "custom"}
    for user in users:
        user.replace_input_with(node, last)
