"""A program with some of its inner tensors as further outputs, to see where an artifact of it differs."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument

from graphquant.passes.editor import copied_graph, rebuild


def with_outputs(program: ExportedProgram, nodes: Sequence[str]) -> ExportedProgram:
    """The program, returning its outputs flat in a tuple, and then the values of ``nodes``."""
    graph = copied_graph(program)
    by_name = {node.name: node for node in graph.nodes}
    output = by_name["output"]
    results = output.args[0]
    assert isinstance(results, list | tuple)
    output.args = ((*results, *(by_name[name] for name in nodes)),)
    signature = copy.deepcopy(program.graph_signature)
    signature.output_specs += [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=name), None) for name in nodes]
    count = sum(spec.kind == OutputKind.USER_OUTPUT for spec in signature.output_specs)
    _, out_spec = torch.utils._pytree.tree_flatten(tuple(range(count)))
    entry = program.module_call_graph[0]
    assert entry.signature is not None
    arguments = [spec.arg for spec in signature.output_specs if spec.kind == OutputKind.USER_OUTPUT]
    called = replace(entry, signature=replace(entry.signature, outputs=arguments, out_spec=out_spec))
    return rebuild(
        program, graph=graph, signature=signature, module_call_graph=[called, *program.module_call_graph[1:]]
    )
