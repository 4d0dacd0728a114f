"""``specialize``: a program of any sequence length as one of a fixed length, such as the one token of a decode step."""

import operator
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from graphquant.errors import ConvertError
from graphquant.graph import ops
from graphquant.graph.shapes import expression
from graphquant.passes.editor import ProgramEditor

_ON_SIZES = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.getitem)


def specialize(program: ExportedProgram, *, sequence: int) -> ExportedProgram:
    """The program for ``sequence`` tokens a step, where the last dim of its first input ``[B, S]`` was dynamic.

    Sizes become numbers; no value changes. Caches, their shapes and the state dict stay as they are. The example inputs
    are kept where no other size is dynamic.

    Raises:
        ConvertError: the sequence is no dynamic dim of the program, or ``sequence`` is not in its range.
    """
    if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < 1:
        raise ConvertError(f"sequence must be a number of tokens from 1 on, not {sequence!r}")
    symbol = _sequence_symbol(program)
    limits = program.range_constraints.get(symbol)
    # torch.export writes 2 as the least size of a dim that may be 1 too.
    if limits is not None and sequence not in limits and (sequence, limits.lower) != (1, 2):
        raise ConvertError(f"the program takes {limits.lower} to {limits.upper} tokens a step, not {sequence}")
    editor = ProgramEditor(program, program.state_dict)
    with torch.no_grad():
        for node in list(editor.graph.nodes):
            if node.op == "placeholder":
                _fix_input(editor, node, symbol, sequence)
            elif node.op == "call_function":
                _fix(editor, node)
        # Sizes that go with the sequence, such as the length P + S of a mask, are symbols of their own.
        editor.interface.drops_example = any(_is_dynamic(node) for node in editor.graph.nodes)
        editor.ranges = {known: limit for known, limit in program.range_constraints.items() if known != symbol}
        return editor.finish()


def _is_dynamic(node: Node) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "placeholder"
        and isinstance(value, torch.Tensor)
        and not all(isinstance(n, int) for n in value.shape)
    )


def _sequence_symbol(program: ExportedProgram) -> Any:
    first = str(program.graph_signature.user_inputs[0])
    value = next(node.meta["val"] for node in program.graph.nodes if node.name == first)
    size = value.shape[-1] if isinstance(value, torch.Tensor) and value.dim() else 0
    dim = expression(size)
    if not dim.is_Symbol:
        raise ConvertError(
            f"the last dim of {first} is {dim}; expected a dynamic sequence [B, S]: the program is specialized already"
        )
    return dim


def _fix_input(editor: ProgramEditor, node: Node, symbol: Any, sequence: int) -> None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not any(expression(size).has(symbol) for size in value.shape):
        return
    if any(expression(size).has(symbol) and expression(size) != symbol for size in value.shape):
        raise ConvertError(f"input {node.name} has a size that follows from the sequence: {tuple(value.shape)}")
    editor.retype(node, [sequence if expression(size) == symbol else size for size in value.shape], value.dtype)


def _fix(editor: ProgramEditor, node: Node) -> None:
    """Compute a node's value anew, from inputs that have theirs; a size that is a number now takes the node's place."""
    if isinstance(node.target, torch._ops.OpOverload):
        if node.meta.get("val") is None:
            return
        value = editor.value_of(node.target, node.args, node.kwargs)
    elif node.target in _ON_SIZES:
        computes: Any = node.target
        value = computes(*map_arg(node.args, lambda source: source.meta["val"]))
    else:
        raise ConvertError(f"{node.name} calls a subgraph ({ops.op_name(node)}): specialize programs without any")
    if isinstance(value, int | torch.SymInt):
        known = expression(value)
        if known.is_Integer:
            _replace_by_number(node, int(known))
            return
    node.meta["val"] = value


def _replace_by_number(node: Node, number: int) -> None:
    for user in list(node.users):
        user.args = map_arg(user.args, lambda source: number if source is node else source)
        user.kwargs = map_arg(dict(user.kwargs), lambda source: number if source is node else source)
    node.graph.erase_node(node)
