"""An ExportedProgram as a plain GraphModule: weights as attributes, one recompilation.

``program.module()`` does the same in five recompilations, adds hooks that do not pickle, and hands out the program's
own parameter objects. Here parameters are new objects over shared storage (so ``.to()`` on the module leaves the
program alone) and buffers are copies (so a cache that calibration writes to stays zero in the program).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

from graphquant.errors import ConvertError
from graphquant.passes.editor import copied_graph

_ATTRIBUTES = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class Unlifted:
    """A graph to be edited, with attributes in place of lifted inputs, and the modules and tensors it refers to."""

    def __init__(self, program: ExportedProgram) -> None:
        self.graph: Graph = copied_graph(program)
        self.attributes: dict[str, Any] = dict(_submodules(program))
        self._signature = program.module_call_graph[0].signature
        tensors = _own_tensors(program)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self._user_inputs: list[Node] = []
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
            if spec.kind in _ATTRIBUTES:
                self._to_attribute(node, str(spec.target), tensors[str(spec.target)])
            elif spec.kind == InputKind.USER_INPUT:
                self._user_inputs.append(node)
                if isinstance(spec.arg, ConstantArgument) and node.users:
                    raise ConvertError(f"input {node.name} is a constant that the graph reads: export it as a tensor")
            else:
                raise ConvertError(f"input {node.name} is a {spec.kind.name}, which cannot become an attribute")
        self._write_back(program)

    def finish(self) -> GraphModule:
        """The module, called like the program: ``module(**inputs)``."""
        assert self._signature is not None
        names = self._signature.forward_arg_names or [node.name for node in self._user_inputs]
        info = _PyTreeInfo(list(names), self._signature.in_spec, self._signature.out_spec)
        self.graph._codegen = _PyTreeCodeGen(info)
        self.graph._tracer_cls = None  # export's tracer cannot be built anew by unpickling
        module = GraphModule(self.attributes, self.graph, "PreparedModule")
        module.graph.lint()
        return module

    def _to_attribute(self, node: Node, target: str, value: Tensor) -> None:
        self.attributes[target] = value
        with self.graph.inserting_before(node):
            attribute = self.graph.get_attr(target)
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
        self.graph.erase_node(node)

    def _write_back(self, program: ExportedProgram) -> None:
        """Turn outputs that are a buffer's or input's next value into a copy_ onto it."""
        mutated = program.graph_signature.buffers_to_mutate | program.graph_signature.user_inputs_to_mutate
        output = next(node for node in self.graph.nodes if node.op == "output")
        results = list(output.args[0])
        kept = []
        by_target = {node.target: node for node in self.graph.nodes if node.op in ("get_attr", "placeholder")}
        for result in results:
            target = mutated.get(result.name) if isinstance(result, Node) else None
            if target is None:
                kept.append(result)
                continue
            with self.graph.inserting_before(output):
                self.graph.call_function(torch.ops.aten.copy_.default, (by_target[target], result))
        output.args = (tuple(kept),)


def _submodules(program: ExportedProgram) -> list[tuple[str, nn.Module]]:
    """Subgraphs of higher-order ops, which the graph calls by attribute."""
    return [(name, module) for name, module in program.graph_module.named_children() if isinstance(module, nn.Module)]


def _own_tensors(program: ExportedProgram) -> dict[str, Tensor]:
    """Parameters as new objects over the same storage, buffers and constants as copies; tied tensors stay tied."""
    fresh: dict[int, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in (program.constants | program.state_dict).items():
        if not isinstance(value, Tensor):
            continue
        if id(value) not in fresh:
            if isinstance(value, nn.Parameter):
                fresh[id(value)] = nn.Parameter(value.detach(), value.requires_grad)
            else:
                fresh[id(value)] = value.detach().clone()
        tensors[name] = fresh[id(value)]
    return tensors
