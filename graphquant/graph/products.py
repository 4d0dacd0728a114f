"""The two products of an attention core, Q·Kᵀ and P·V, as matmul or einsum, and what the dims of their operands are.

Of a matmul the places of the dims say it. Of an einsum its letters do, in whatever order they stand:

    scores   "bqhd,bkhd->bhqk"   the last letter is of the keys, the one before of the queries, the contracted is D
    output   "bhqk,bkhd->bqhd"   the weights' last letter is the keys', the letter that only the values have is D
"""

from dataclasses import dataclass

from torch.fx import Node

from graphquant.graph import ops
from graphquant.graph.layout_walk import Labels
from graphquant.graph.shapes import shape

OPERAND_LABELS: dict[int, Labels] = {3: ("BH", "S", "D"), 4: ("B", "H", "S", "D"), 5: ("B", "H", "N", "S", "D")}


@dataclass(frozen=True)
class Operand:
    """An input of the core and the labels of its dims; no labels where it is not understood."""

    node: Node
    labels: Labels


def is_product(node: Node) -> bool:
    """Whether a node is an einsum of two tensors."""
    return ops.kind(node) == "einsum" and len(ops.bound(node)["tensors"]) == 2


def query_and_key(scores: Node, keys_first: bool) -> tuple[Operand, Operand]:
    """The operands of Q·Kᵀ ``[B, H, S, S]``, or of K·Qᵀ."""
    if not is_product(scores):
        left, right = ops.factors(scores)
        labels = OPERAND_LABELS.get(len(shape(right)), ())
        transposed = (*labels[:-2], "D", "S") if labels else ()
        straight, turned = Operand(left, OPERAND_LABELS.get(len(shape(left)), ())), Operand(right, transposed)
        return (turned, straight) if keys_first else (straight, turned)
    terms, out = _letters(scores)
    operands = list(zip(ops.bound(scores)["tensors"], terms, strict=True))
    if out[-2 if keys_first else -1] not in terms[1]:
        operands.reverse()
    front = OPERAND_LABELS.get(len(out), ())[:-2]
    contracted = [letter for letter in terms[0] if letter in terms[1] and letter not in out]
    if not front or len(contracted) != 1:
        return Operand(operands[0][0], ()), Operand(operands[1][0], ())
    known = dict(zip(out, (*front, "S", "S"), strict=True)) | {contracted[0]: "D"}
    first, second = (Operand(node, _labels(letters, known)) for node, letters in operands)
    return first, second


def value_of(output: Node, weights: Node) -> Operand:
    """The values of P·V, read beside ``weights`` ``[B, H, S, S]``."""
    if not is_product(output):
        value = ops.factors(output)[1]
        return Operand(value, OPERAND_LABELS.get(len(shape(value)), ()))
    tensors, (terms, out) = ops.bound(output)["tensors"], _letters(output)
    mine = 0 if tensors[0] is weights else 1
    letters, other = terms[mine], terms[1 - mine]
    front = OPERAND_LABELS.get(len(letters), ())[:-2]
    alone = [letter for letter in other if letter not in letters and letter in out]
    if not front or len(alone) != 1 or letters[-1] not in other or letters[-1] in out or letters[-2] in other:
        return Operand(tensors[1 - mine], ())
    known = dict(zip(letters, (*front, "", "S"), strict=True)) | {alone[0]: "D"}
    return Operand(tensors[1 - mine], _labels(other, known))


def _labels(letters: str, known: dict[str, str]) -> Labels:
    """The letters' labels, where they are those of states in some order; else none."""
    labels = tuple(known.get(letter, "") for letter in letters)
    return labels if sorted(labels) in _STATES and len(labels) == len(letters) else ()


_STATES = [sorted(labels) for labels in OPERAND_LABELS.values()]


def _letters(node: Node) -> tuple[tuple[str, str], str]:
    """Letters of an einsum's two terms and of its output, an ellipsis spelled out."""
    args = ops.bound(node)
    left, _, out = args["equation"].replace(" ", "").partition("->")
    terms = left.split(",")
    if "..." in left:
        widths = [len(shape(tensor)) - len(term) + 3 for tensor, term in zip(args["tensors"], terms, strict=True)]
        free = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in args["equation"]][:8]
        dims = "".join(free)[: max(widths)]
        terms = [term.replace("...", dims[len(dims) - width :]) for term, width in zip(terms, widths, strict=True)]
        out = out.replace("...", dims)
    if "->" not in args["equation"]:
        both = "".join(terms)
        out = "".join(sorted(letter for letter in set(both) if both.count(letter) == 1))
    return (terms[0], terms[1]), out
