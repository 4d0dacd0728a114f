"""What a program looks like from outside, under edit: its signature, the trees of its inputs and outputs, its example.

A leaf of the inputs or outputs may be split into several tensors: codes with the scales that go with them become a
tuple in the place of the tensor that was there.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_unflatten


class Interface:
    """The outside of one program under edit."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.signature = copy.deepcopy(program.graph_signature)
        self._inputs: dict[str, list[str]] = {}
        self._outputs: dict[str, list[str]] = {}
        self._moved: dict[str, tuple[int, int]] = {}
        self.drops_example = False

    def buffer_of(self, name: str) -> str | None:
        """The buffer behind a placeholder, None behind an input."""
        kinds = (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
        for spec in self.signature.input_specs:
            if spec.arg.name == name and spec.kind in kinds:
                return str(spec.target)
        return None

    def split_input(self, leaf: str, after: str, name: str) -> None:
        """Make the input ``leaf`` a tuple with one tensor more, whose placeholder follows that of ``after``."""
        specs = self.signature.input_specs
        position = next(index for index, spec in enumerate(specs) if spec.arg.name == after) + 1
        specs.insert(position, InputSpec(InputKind.USER_INPUT, TensorArgument(name=name), None))
        self._inputs.setdefault(leaf, [leaf]).append(name)

    def move_dim(self, name: str, old: int, new: int) -> None:
        """Note that a dim of the input ``name`` is another one now."""
        self._moved[name] = (old, new)

    def split_output(self, leaf: str, names: Sequence[str]) -> None:
        """Make the output that the node ``leaf`` is a tuple with further tensors."""
        self._outputs.setdefault(leaf, [leaf]).extend(names)

    def finish(self, graph: Graph, results: Sequence[Any]) -> dict[str, Any]:
        """The parts of a program that its outside is, for outputs that may be other nodes than before."""
        entry = self.program.module_call_graph[0]
        specs = iter(results)
        written: list[OutputSpec] = []
        for spec in self.signature.output_specs:
            node = next(specs)
            named = isinstance(node, Node) and isinstance(spec.arg, TensorArgument)
            written.append(OutputSpec(spec.kind, TensorArgument(name=node.name), spec.target) if named else spec)
            for _ in self._outputs.get(node.name, [""])[1:] if isinstance(node, Node) else ():
                more = next(specs)
                written.append(OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=more.name), None))
        self.signature.output_specs[:] = written
        changed: dict[str, Any] = {"signature": self.signature}
        if self._inputs or self._outputs:
            assert entry.signature is not None
            users = [spec.arg for spec in self.signature.input_specs if spec.kind == InputKind.USER_INPUT]
            outs = [spec.arg for spec in written if spec.kind == OutputKind.USER_OUTPUT]
            called = replace(
                entry.signature,
                inputs=users,
                outputs=outs,
                in_spec=_split(entry.signature.in_spec, self._sizes(users, self._inputs)),
                out_spec=_split(entry.signature.out_spec, self._sizes(outs, self._outputs)),
            )
            changed["module_call_graph"] = [
                replace(entry, signature=called),
                *self.program.module_call_graph[1:],
            ]
        changed["example_inputs"] = self._example(graph)
        changed["guards"] = self._guards()
        return changed

    def _guards(self) -> list[tuple[str, str]]:
        """What to replace in the program's checks of its inputs, which name the inputs by their place in the tree."""
        entry = self.program.module_call_graph[0].signature
        users = [str(name) for name in self.program.graph_signature.user_inputs]
        if entry is None or not (self._moved or self._inputs) or entry.in_spec.num_leaves != len(users):
            return []
        paths, _ = tree_flatten_with_path(tree_unflatten(users, entry.in_spec))
        replaced = []
        for path, name in paths:
            old, new = self._moved.get(name, (0, 0))
            place = f"L{keystr(path[1:])}"
            inner = "[0]" if name in self._inputs else ""
            if old != new:
                replaced.append((f"{place}.size()[{old}]", f"{place}{inner}.size()[{new}]"))
            if inner:
                replaced.append((f"{place}.size()", f"{place}{inner}.size()"))
        return replaced

    def _sizes(self, arguments: Sequence[Any], split: dict[str, list[str]]) -> list[int]:
        """Of every leaf before it was split, how many tensors it is now."""
        further = {name for names in split.values() for name in names[1:]}
        return [len(split.get(arg.name, [arg.name])) for arg in arguments if arg.name not in further]

    def _example(self, graph: Graph) -> Any:
        """The example inputs, those of another shape or dtype than before as zeros."""
        if self.program.example_inputs is None or self.drops_example:
            return None
        leaves, spec = tree_flatten(self.program.example_inputs)
        values = {node.name: node.meta.get("val") for node in graph.nodes if node.op == "placeholder"}
        before = {node.name: node.meta.get("val") for node in self.program.graph.nodes if node.op == "placeholder"}
        users = [str(name) for name in self.program.graph_signature.user_inputs]
        if len(users) != len(leaves):
            return self.program.example_inputs
        sizes = _bindings(users, before, leaves)
        made = [
            tuple(_like(values[part], values[part] is before.get(part), leaf, sizes) for part in parts)
            for leaf, parts in (
                (leaf, self._inputs.get(name, [name])) for name, leaf in zip(users, leaves, strict=True)
            )
        ]
        return tree_unflatten([parts if len(parts) > 1 else parts[0] for parts in made], spec)


def _split(spec: TreeSpec, sizes: Sequence[int]) -> TreeSpec:
    """A tree whose leaves of several tensors are tuples."""
    leaves = [tuple(range(size)) if size > 1 else 0 for size in sizes]
    return tree_flatten(tree_unflatten(leaves, spec))[1]


def _bindings(names: Sequence[str], values: dict[str, Any], leaves: Sequence[Any]) -> dict[str, int]:
    """The sizes that symbols have in the example."""
    sizes: dict[str, int] = {}
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            sizes |= {str(dim): size for dim, size in zip(values[name].shape, leaf.shape, strict=True)}
    return sizes


def _like(value: Any, same: bool, leaf: Any, sizes: dict[str, int]) -> Any:
    """An example of a tensor like ``value``: the one there was where it is the same or longer, else zeros."""
    if same or not isinstance(value, torch.Tensor):
        return leaf
    if leaf.dtype == value.dtype and leaf.dim() == value.dim():
        fixed = [size if isinstance(size, int) else leaf.shape[dim] for dim, size in enumerate(value.shape)]
        if all(size <= most for size, most in zip(fixed, leaf.shape, strict=True)):
            return leaf[tuple(slice(size) for size in fixed)].contiguous()
    return torch.zeros([sizes[str(dim)] if not isinstance(dim, int) else dim for dim in value.shape], dtype=value.dtype)
