"""Editing an ExportedProgram in place of re-tracing it: new constants, new calls, a new program around them.

This is the only file that touches what torch keeps private: the program's constructor, its verifier, and the way its
signature lists buffers. It was written for torch 2.13.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from graphquant.errors import ConvertError
from graphquant.graph.writes import written_buffers
from graphquant.passes.interface import Interface
from graphquant.passes.placing import insertion_point
from graphquant.records import node_name


def rebuild(
    program: ExportedProgram,
    *,
    graph: Graph | None = None,
    signature: Any = None,
    state_dict: Mapping[str, Tensor] | None = None,
    constants: Mapping[str, Any] | None = None,
    range_constraints: Any = None,
    module_call_graph: Any = None,
    example_inputs: Any = ...,
    guards: Sequence[tuple[str, str]] = (),
) -> ExportedProgram:
    """A program like ``program`` with some of its parts replaced; torch's verifier checks the result.

    A graph belongs to one program, so it is copied where none is given. ``guards`` are replacements in the program's
    checks of its inputs.
    """
    made = ExportedProgram(
        root=program.graph_module,
        graph=copied_graph(program) if graph is None else graph,
        graph_signature=program.graph_signature if signature is None else signature,
        state_dict=dict(program.state_dict if state_dict is None else state_dict),
        range_constraints=program.range_constraints if range_constraints is None else range_constraints,
        module_call_graph=program.module_call_graph if module_call_graph is None else module_call_graph,
        example_inputs=program.example_inputs if example_inputs is ... else example_inputs,
        constants=dict(program.constants if constants is None else constants),
        verifiers=[program.verifier],
    )
    # Made anew, the checks would name the inputs by the places that they had when they were captured.
    made._guards_code = list(program._guards_code)
    for old, new in guards:
        made._guards_code = [check.replace(old, new) for check in made._guards_code]
    return made


def copied_graph(program: ExportedProgram) -> Graph:
    """A copy of a program's graph with the names that its signature knows (fx renames ``input`` and other builtins)."""
    graph: Graph = copy.deepcopy(program.graph)
    for original, node in zip(program.graph.nodes, graph.nodes, strict=True):
        node.name = original.name
    return graph


class ProgramEditor:
    """A copy of a program's graph under edit; ``finish`` makes it a program, the original is never touched."""

    def __init__(self, program: ExportedProgram, state_dict: Mapping[str, Tensor]) -> None:
        self.program = program
        self.graph: Graph = copied_graph(program)
        self.nodes: dict[str, Node] = {node.name: node for node in self.graph.nodes}
        self.state_dict, self.constants = dict(state_dict), dict(program.constants)
        self.interface = Interface(program)
        self.user_inputs = frozenset(str(name) for name in program.graph_signature.user_inputs)
        self.ranges = program.range_constraints
        self._values: dict[Any, Any] = {}
        lifted = (InputKind.PARAMETER, InputKind.BUFFER)
        # Placeholders keep torch's order: parameters, buffers, then constants and the user's inputs.
        self._position = sum(1 for spec in self.interface.signature.input_specs if spec.kind in lifted)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self._before = placeholders[self._position] if self._position < len(placeholders) else placeholders[-1].next
        self._fake_mode = next(
            value.fake_mode for node in placeholders if hasattr(value := node.meta.get("val"), "fake_mode")
        )

    @cached_property
    def written_inputs(self) -> frozenset[str]:
        """The placeholders of buffers that the program writes to."""
        signature, written = self.program.graph_signature, set(written_buffers(self.program))
        names = signature.inputs_to_buffers | signature.inputs_to_lifted_tensor_constants
        return frozenset(name for name, target in names.items() if target in written)

    def constant(self, target: str, value: Tensor, *, written: bool = False) -> Node:
        """A new buffer of the program: a constant in its state dict, or one that it writes to, which no file keeps."""
        name = f"b_{node_name(target)}"
        if target in self.state_dict or target in self.constants:
            raise ConvertError(f"the program already has a tensor named {target}: it was converted before")
        with self.graph.inserting_before(self._before):
            node: Node = self.graph.placeholder(name)
        if node.name != name:
            raise ConvertError(
                f"the program already has a node named {name}: two modules have the same name but for punctuation"
            )
        node.meta["val"] = self.fake(value.shape, value.dtype, value.device)
        spec = InputSpec(InputKind.BUFFER, TensorArgument(name=node.name), target, persistent=not written)
        self.interface.signature.input_specs.insert(self._position, spec)
        self._position += 1
        (self.constants if written else self.state_dict)[target] = value
        return node

    def fake(self, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of the graph's own kind, which has a shape and no values."""
        with self._fake_mode:
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def retype(self, node: Node, shape: Any, dtype: torch.dtype) -> None:
        """Give a buffer that the program writes to, or an input, another shape and dtype; a buffer begins as zeros."""
        device = node.meta["val"].device
        node.meta["val"] = self.fake(shape, dtype, device)
        target = self.interface.buffer_of(node.name)
        if target is not None:
            home = self.state_dict if target in self.state_dict else self.constants
            home[target] = torch.zeros(tuple(shape), dtype=dtype, device=device)

    def further_input(self, before: Node, after: Node, shape: Any, dtype: torch.dtype, name: str) -> Node:
        """A new input of the program, part of the same leaf of its inputs as ``before``, placed behind ``after``."""
        with self.graph.inserting_after(after):
            node: Node = self.graph.placeholder(name)
        node.meta["val"] = self.fake(shape, dtype, before.meta["val"].device)
        self.interface.split_input(before.name, after.name, node.name)
        return node

    def after(self, like: Node) -> "CallBuilder":
        """A builder of calls placed right after ``like``, with its module path and source line."""
        return CallBuilder(self, like)

    def finish(self) -> ExportedProgram:
        """The edited program, verified."""
        results = next(node for node in self.graph.nodes if node.op == "output").args[0]
        assert isinstance(results, list | tuple)
        return rebuild(
            self.program,
            graph=self.graph,
            state_dict=self.state_dict,
            constants=self.constants,
            range_constraints=self.ranges,
            **self.interface.finish(self.graph, results),
        )

    def value_of(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The fake value of a call, computed once for all layers that make the same call on the same shapes."""
        real_args, real_kwargs = map_arg((args, kwargs), lambda node: node.meta["val"])
        leaves = torch.utils._pytree.tree_leaves((real_args, real_kwargs))
        key = (target, *(_fingerprint(leaf) for leaf in leaves))
        if key not in self._values:
            with self._fake_mode:
                if target.namespace == "quantized_decomposed":
                    self._values[key] = _pair_value(target, real_args, real_kwargs)
                else:
                    self._values[key] = target(*real_args, **real_kwargs)
        return self._values[key]


def _pair_value(target: Any, args: Any, kwargs: Any) -> Tensor:
    """The fake value of a quantize or dequantize op: its own meta kernel casts half precision, which fixes B and S."""
    quantizes = "::quantize" in target._schema.name
    dtype = args[-1] if quantizes else kwargs.get("out_dtype", torch.float32)
    return torch.empty_like(args[0], dtype=dtype)


def _fingerprint(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.dtype, value.device, *map(str, value.shape), *map(str, value.stride()))
    # A literal scale changes neither shape nor dtype; axes, sizes and dtypes do.
    return (type(value), None if isinstance(value, float) else str(value))


class CallBuilder:
    """Appends calls one after another behind a node."""

    def __init__(self, editor: ProgramEditor, like: Node) -> None:
        self.editor = editor
        self.like = like
        self.made: list[Node] = []

    def __call__(self, target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> Node:
        """Append ``target(*args, **kwargs)``; a ``name`` must be free."""
        with self._here():
            node: Node = self.editor.graph.create_node("call_function", target, args, kwargs, name=name)
        if name is not None and node.name != name:
            raise ConvertError(f"the program already has a node named {name}: it was converted before")
        node.meta["val"] = self.editor.value_of(target, args, kwargs)
        for key in ("stack_trace", "nn_module_stack", "torch_fn"):
            if key in self.like.meta:
                node.meta[key] = self.like.meta[key]
        self.made.append(node)
        return node

    def number(self, target: Any, *args: Any) -> Any:
        """Append a call on sizes, such as a sum of two; of numbers alone it is their value."""
        if not any(isinstance(argument, Node) for argument in args):
            return target(*args)
        with self._here():
            node: Node = self.editor.graph.call_function(target, args)
        node.meta["val"] = target(*map_arg(args, lambda source: source.meta["val"]))
        self.made.append(node)
        return node

    def _here(self) -> Any:
        """Behind what was appended last."""
        return self.editor.graph.inserting_after(self.made[-1] if self.made else insertion_point(self.like))
