"""The one reader of aten spellings: every other rule asks it what a node *means*.

One operation has several spellings (view, reshape, _unsafe_view; transpose, permute, t; linear, addmm, mm; negative
dims; positional or keyword arguments). Here each becomes one ``kind`` with its arguments bound by the op's schema.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

KINDS: Mapping[str, tuple[str, ...]] = {
    "alias": ("clone", "contiguous", "alias", "detach", "detach_", "lift_fresh_copy", "dropout", "feature_dropout"),
    "cast": ("to", "_to_copy", "type_as", "float", "half"),
    "reshape": ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_copy", "_reshape_alias"),
    "permute": ("permute", "transpose", "t", "swapaxes", "numpy_T", "mT", "transpose_copy", "permute_copy"),
    "unsqueeze": ("unsqueeze", "unsqueeze_copy"),
    "squeeze": ("squeeze", "squeeze_copy"),
    "expand": ("expand", "expand_as", "broadcast_to", "expand_copy"),
    "repeat": ("repeat", "tile"),
    "repeat_interleave": ("repeat_interleave",),
    "slice": ("slice", "slice_copy", "narrow"),
    "split": ("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "tensor_split", "split_copy"),
    "cat": ("cat", "concat"),
    "write": ("index_copy", "index_copy_", "index_put", "index_put_", "_index_put_impl_", "copy_", "copy"),
    "scale": ("mul", "div", "mul_", "div_"),
    "add": ("add", "add_", "sub"),
    "select_where": ("where", "masked_fill", "masked_fill_"),
    "bounded": ("tanh", "clamp", "clamp_min", "clamp_max"),
    "linear": ("linear",),
    "matmul": ("matmul", "bmm", "mm"),
    "addmm": ("addmm", "baddbmm"),
    "einsum": ("einsum",),
    "convolution": ("convolution", "conv1d", "conv2d", "conv3d"),
    "softmax": ("softmax", "_softmax", "_safe_softmax", "special_softmax"),
    "sdpa": (
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_attention_math",
    ),
    "allocate": ("empty", "new_empty", "empty_like", "empty_permuted", "new_zeros", "zeros", "zeros_like", "new_full"),
    "shape": ("sym_size", "_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size"),
}
_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"  # torch.export's entry for a node of no module
_KIND_OF = {f"aten::{name}": kind for kind, names in KINDS.items() for name in names} | {
    "getitem": "getitem",
    "flex_attention": "sdpa",  # a higher-order op; query, key and value are its first arguments too
}


def op_name(node: Node) -> str:
    """``aten::transpose`` for a call of that op, whatever the overload; else the target in words."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name
    return getattr(node.target, "__name__", str(node.target))


def kind(node: Node) -> str:
    """The meaning of a node, a key of ``KINDS``, ``getitem``, ``input``, or ``other``."""
    if node.op in ("placeholder", "get_attr"):
        return "input"
    if node.op != "call_function":
        return "other"
    return _KIND_OF.get(op_name(node), "other")


def bound(node: Node) -> dict[str, Any]:
    """Arguments of an aten call by the names of its schema, defaults included."""
    assert isinstance(node.target, torch._ops.OpOverload)
    values: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):
        if position < len(node.args):
            values[argument.name] = node.args[position]
        elif argument.name in node.kwargs:
            values[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            values[argument.name] = argument.default_value
    return values


def tensor_inputs(node: Node) -> list[Node]:
    """Input nodes that carry tensors, in argument order (shape arithmetic is left out)."""
    return [source for source in node.all_input_nodes if is_tensor(source)]


def first_input(node: Node) -> Node:
    """The tensor that an alias, cast, reshape, slice … reads."""
    return tensor_inputs(node)[0]


def written(node: Node) -> Node:
    """What a cache write joins to the cache: the source or values of an indexed write, the second tensor of a cat."""
    args = bound(node)
    found = args["tensors"][1] if kind(node) == "cat" else args.get("source") or args.get("values") or args["src"]
    assert isinstance(found, Node)
    return found


def factors(node: Node) -> tuple[Node, Node]:
    """Left and right operand of a ``matmul`` or ``addmm`` node, which may be one and the same."""
    args = list(bound(node).values())
    left, right = args[1:3] if kind(node) == "addmm" else args[:2]
    return left, right


def is_tensor(node: Node) -> bool:
    """Whether a node's value is a tensor or a tuple of tensors."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and bool(value))


def permutation(node: Node, rank: int) -> list[int]:
    """Input dim of each output dim of a ``permute`` node."""
    args, name = bound(node), op_name(node).removeprefix("aten::")
    if name.startswith("permute"):
        return [dim % rank for dim in args["dims"]]
    order = list(range(rank))
    if name in ("t", "numpy_T"):
        return order[::-1]
    first, second = (-1, -2) if name == "mT" else tuple(args.values())[1:3]
    order[first], order[second] = order[second], order[first]
    return order


def stack(node: Node) -> list[tuple[str, str]]:
    """Module path and class name of every module around a node, outermost first."""
    entries = node.meta.get("nn_module_stack") or {}
    frames = []
    for path, cls in entries.values():
        if path == _NO_MODULE:
            continue
        name = cls if isinstance(cls, str) else getattr(cls, "__name__", str(cls))
        frames.append((str(path), name.rsplit(".", 1)[-1]))
    return frames


def source_line(node: Node) -> str:
    """``file.py:123`` of the innermost code outside torch that made a node, or an empty string."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    frames = [line.removeprefix('File "').partition('", line ') for line in lines if line.startswith('File "')]
    own = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    if not own:
        return ""
    file, _, rest = own[-1]
    return f"{file.rsplit('/', 1)[-1]}:{rest.split(',')[0]}"
