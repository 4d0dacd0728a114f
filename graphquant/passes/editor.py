"""Editing an ExportedProgram in place of re-tracing it: new constants, new calls, a new program around them.

This is the only file that touches what torch keeps private: the program's constructor, its verifier, and the way its
signature lists buffers. It was written for torch 2.13.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from graphquant.errors import ConvertError
from graphquant.graph import AttentionSites, ops
from graphquant.graph.writes import family, fills, shared
from graphquant.plan import PlannedSite
from graphquant.records import node_name


def rebuild(
    program: ExportedProgram,
    *,
    graph: Graph | None = None,
    signature: Any = None,
    state_dict: Mapping[str, Tensor] | None = None,
    range_constraints: Any = None,
    module_call_graph: Any = None,
) -> ExportedProgram:
    """A program like ``program`` with some of its parts replaced; torch's verifier checks the result.

    A graph belongs to one program, so it is copied where none is given.
    """
    return ExportedProgram(
        root=program.graph_module,
        graph=copied_graph(program) if graph is None else graph,
        graph_signature=program.graph_signature if signature is None else signature,
        state_dict=dict(program.state_dict if state_dict is None else state_dict),
        range_constraints=program.range_constraints if range_constraints is None else range_constraints,
        module_call_graph=program.module_call_graph if module_call_graph is None else module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=[program.verifier],
    )


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
        self.state_dict = dict(state_dict)
        self._specs: list[InputSpec] = []
        self._values: dict[Any, Any] = {}
        inputs = program.graph_signature.input_specs
        lifted = (InputKind.PARAMETER, InputKind.BUFFER)
        # Placeholders keep torch's order: parameters, buffers, then constants and the user's inputs.
        self._position = sum(1 for spec in inputs if spec.kind in lifted)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self._before = placeholders[self._position] if self._position < len(placeholders) else placeholders[-1].next
        self._fake_mode = next(
            value.fake_mode for node in placeholders if hasattr(value := node.meta.get("val"), "fake_mode")
        )

    def constant(self, target: str, value: Tensor) -> Node:
        """A new persistent buffer of the program, named ``target`` in its state dict."""
        name = f"b_{node_name(target)}"
        if target in self.state_dict:
            raise ConvertError(f"the program already has a tensor named {target}: it was converted before")
        with self.graph.inserting_before(self._before):
            node: Node = self.graph.placeholder(name)
        if node.name != name:
            raise ConvertError(
                f"the program already has a node named {name}: two modules have the same name but for punctuation"
            )
        with self._fake_mode:
            node.meta["val"] = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        self._specs.append(InputSpec(InputKind.BUFFER, TensorArgument(name=node.name), target, persistent=True))
        self.state_dict[target] = value
        return node

    def after(self, like: Node) -> "CallBuilder":
        """A builder of calls placed right after ``like``, with its module path and source line."""
        return CallBuilder(self, like)

    def finish(self) -> ExportedProgram:
        """The edited program, verified."""
        signature = copy.deepcopy(self.program.graph_signature)
        position = self._position
        signature.input_specs[position:position] = self._specs
        results = next(node for node in self.graph.nodes if node.op == "output").args[0]
        assert isinstance(results, list | tuple)
        signature.output_specs[:] = [
            OutputSpec(spec.kind, TensorArgument(name=node.name), spec.target)
            if isinstance(node, Node) and isinstance(spec.arg, TensorArgument)
            else spec
            for spec, node in zip(signature.output_specs, results, strict=True)
        ]
        return rebuild(self.program, graph=self.graph, signature=signature, state_dict=self.state_dict)

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
        graph = self.editor.graph
        with graph.inserting_after(self.made[-1] if self.made else insertion_point(self.like)):
            node: Node = graph.create_node("call_function", target, args, kwargs, name=name)
        if name is not None and node.name != name:
            raise ConvertError(f"the program already has a node named {name}: it was converted before")
        node.meta["val"] = self.editor.value_of(target, args, kwargs)
        for key in ("stack_trace", "nn_module_stack", "torch_fn"):
            if key in self.like.meta:
                node.meta[key] = self.like.meta[key]
        self.made.append(node)
        return node


def insertion_point(node: Node) -> Node:
    """Where calls on a node's value may start: behind it, behind what fills it, and behind the last placeholder."""
    while node.op == "placeholder" and node.next.op == "placeholder":
        node = node.next
    return next(reversed(fills(node)), node)


def readers(node: Node, planned: PlannedSite, sites: AttentionSites, nodes: Mapping[str, Node]) -> list[Node]:
    """The users of a site's tensor that are to read its quantized values.

    All that read values, and not only its shape or dtype; of the input of some projections, theirs alone: other
    projections, an MLP beside the attention and a residual sum may read the same tensor.
    """
    start = insertion_point(node)
    users = [user for user in node.users if ops.kind(user) != "shape" and (user > start or not fills(node))]
    if not planned.site.role.endswith(".input"):
        return users
    towards: set[Node] = set()
    stack = [nodes[sites[key.removesuffix("input") + "output"].node] for key in planned.keys]
    while stack:
        member = stack.pop()
        towards.add(member)
        stack.extend(source for source in member.all_input_nodes if source is not node and source not in towards)
    return [user for user in users if user in towards]


def refuse_in_place(node: Node, planned: PlannedSite) -> None:
    """Refuse a site whose tensor is overwritten later, itself or by what it is a view of: a copy would miss the write.

    Raises:
        ConvertError: naming the op.
    """
    base = node
    while sources := shared(base):
        base = next(iter(sources))
    members = {base} if base is node else family(base)
    start = insertion_point(node) if fills(node) else node
    views = family(node) if fills(node) else set()
    early = [user for user in node.users if user < start and user not in views and ops.kind(user) != "shape"]
    # A view that was taken before the tensor was filled: what reads it later would miss the quantized values.
    before = [view for view in views if view is not node and view < start]
    early += [view for view in before if any(user > start and user not in views for user in view.users)]
    if early:
        raise ConvertError(
            f"{planned.site.where} is read by {early[0].name} before {start.name} has filled it: fill it first, or "
            "leave this site out with ignore"
        )
    for writer in sorted(members | set(node.users)):
        written = {source for source, writes in shared(writer).items() if writes}
        if writer > start and not written.isdisjoint(members):
            raise ConvertError(
                f"{planned.site.where} is overwritten in place by {writer.name} ({writer.target}): use an "
                "out-of-place op in the model, or leave this site out with ignore"
            )
