"""Shapes with symbolic dims: equality without adding guards, and which dims a reshape merges or splits."""

from collections.abc import Sequence

import sympy
import torch
from torch.fx import Node

Dim = int | torch.SymInt


def shape(node: Node) -> tuple[Dim, ...]:
    """Shape of a node's tensor, its symbolic dims unevaluated; empty where the node carries no single tensor."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def expression(dim: Dim) -> sympy.Expr:
    """A dim as a sympy expression; reading it that way adds no guard to the program."""
    return dim.node.expr if isinstance(dim, torch.SymInt) else sympy.Integer(dim)


def same(left: Dim, right: Dim) -> bool:
    """Whether two dims are equal whatever the inputs."""
    return bool(expression(left) == expression(right))


def same_shape(left: Sequence[Dim], right: Sequence[Dim]) -> bool:
    """Whether two shapes are equal whatever the inputs."""
    return len(left) == len(right) and all(map(same, left, right))


def static(dim: Dim) -> int | None:
    """The value of a dim that is a constant, else None."""
    value = expression(dim)
    return int(value) if value.is_Integer else None


def show(dims: Sequence[Dim]) -> str:
    """A shape as text, symbols by name."""
    return "[" + ", ".join(str(expression(dim)) for dim in dims) + "]"


def segments(out: Sequence[Dim], source: Sequence[Dim]) -> list[tuple[list[int], list[int]]] | None:
    """Split a reshape into its smallest independent parts, as (output dims, input dims) of equal product.

    ``[4·s, t, 32]`` from ``[s, 4, t, 32]`` is ``[([0], [0, 1]), ([1], [2]), ([2], [3])]``; None where the products
    do not line up.
    """
    parts: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(out) or j < len(source):
        if i == len(out) or j == len(source):  # only dims of size 1 may be left over
            rest = list(out[i:]) + list(source[j:])
            return parts if all(static(dim) == 1 for dim in rest) else None
        left, right = expression(out[i]), expression(source[j])
        mine, theirs = [i], [j]
        i, j = i + 1, j + 1
        while sympy.expand(left - right) != 0:
            grow_right = _divides(right, left)
            if grow_right and j < len(source):
                right, j = right * expression(source[j]), j + 1
                theirs.append(j - 1)
            elif not grow_right and i < len(out):
                left, i = left * expression(out[i]), i + 1
                mine.append(i - 1)
            else:
                return None
        parts.append((mine, theirs))
    return parts


def _divides(small: sympy.Expr, large: sympy.Expr) -> bool:
    """Whether ``large`` is ``small`` times a polynomial with integer coefficients (or just larger, for two numbers)."""
    if small.is_Integer and large.is_Integer:
        return bool(small < large)
    quotient = sympy.cancel(large / small)
    return bool(sympy.denom(quotient) == 1)
