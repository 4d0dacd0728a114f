"""One-token attention over a stored cache in the form that Inductor turns into the fastest loops.

Loads of int8 are slow in its loops on AVX2, and a row of keys is a sum across lanes. So four codes are loaded as one
int32 and taken apart by shifts, and keys lie with their tokens in lanes: ``[B, H, W/4, L, 4]`` in the place of
``[B, H, L, W]``, W bytes a token. The query heads that share a KV head read each code once:

    s[g, l] = Σ_c Σ_j q[g, 4c + j] · code_j(K[c, l])            lanes along l
    o[g, 4c + j] = Σ_l e[g, l] · code_j(V[l, c]) / Σ_l e[g, l]  lanes along c, l in blocks

with e = exp(s − max s). A zero point of keys is the same for every l of a query, which softmax does not see, and of
values it is subtracted from the result. A scale per token multiplies s, and e in the numerator.
"""

import torch
from torch.fx import Node

from graphquant.passes.editor import CallBuilder
from graphquant.passes.stored_reads import StoredRead

aten = torch.ops.aten
BLOCK = 256
"""Tokens that are summed in one run, so that a sum is short and its rounding small."""
LANES = 4
"""Codes, or bytes of codes, in an int32."""


def int32_words(call: CallBuilder, codes: Node) -> Node:
    """Four codes as one int32; by way of float32, which Inductor loads as whole vectors where int32 it does not."""
    return call(aten.view.dtype, call(aten.view.dtype, codes, torch.float32), torch.int32)


def _codes(call: CallBuilder, words: Node, read: StoredRead) -> list[Node]:
    """The codes in int32 words as float32, byte 0 to 3; packed ones the low halves first, then the high ones."""
    dtype = read.args.dtype
    if dtype.num_bits > 4:
        signed = dtype.type == "int"
        shifts = [(24 - 8 * byte, 24) if signed else (8 * byte, None) for byte in range(LANES)]
        return [_signed(call, words, *shift) if signed else _bits(call, words, shift[0], 255) for shift in shifts]
    nibbles = [_bits(call, words, 8 * byte + half, 15) for half in (0, 4) for byte in range(LANES)]
    return [call(aten.add.Tensor, nibble, dtype.qmin) if dtype.qmin else nibble for nibble in nibbles]


def _signed(call: CallBuilder, words: Node, left: int, right: int) -> Node:
    up = call(aten.__lshift__.Scalar, words, left) if left else words
    return call(aten._to_copy.default, call(aten.__rshift__.Scalar, up, right), dtype=torch.float32)


def _bits(call: CallBuilder, words: Node, right: int, mask: int) -> Node:
    down = call(aten.__rshift__.Scalar, words, right) if right else words
    return call(aten._to_copy.default, call(aten.bitwise_and.Scalar, down, mask), dtype=torch.float32)


def scores_of(call: CallBuilder, q: Node, words: Node, read: StoredRead) -> Node:
    """Q·Kᵀ ``[B, H, G, L]``, less what softmax does not see."""
    codes = _codes(call, words, read)
    rows = []
    for group in range(int(q.meta["val"].shape[2])):
        row = call(aten.select.int, q, 2, group)
        factors = _by_code(call, row, len(codes))
        products = [call(aten.mul.Tensor, factor, code) for factor, code in zip(factors, codes, strict=True)]
        rows.append(call(aten.sum.dim_IntList, _tree(call, products), [2]))
    scores = call(aten.stack.default, rows, 2)
    if read.scale is None:
        return scores
    if read.shift is not None:  # per token, so that softmax would see it
        whole = call(aten.sum.dim_IntList, q, [-1], True)
        shift = call(aten.transpose.int, read.shift, 2, 3)
        scores = call(aten.sub.Tensor, scores, call(aten.mul.Tensor, whole, shift))
    return call(aten.mul.Tensor, scores, call(aten.transpose.int, read.scale, 2, 3))


def _by_code(call: CallBuilder, row: Node, count: int) -> list[Node]:
    """The channels of ``row [B, H, D]`` that go with each of the codes of a word, ``[B, H, W/4, 1]``."""
    width = int(row.meta["val"].shape[-1])
    halves = count // LANES
    parts = [
        call(aten.slice.Tensor, row, -1, half * width // halves + byte, (half + 1) * width // halves, LANES)
        for half in range(halves)
        for byte in range(LANES)
    ]
    return [call(aten.unsqueeze.default, part, -1) for part in parts]


def _tree(call: CallBuilder, terms: list[Node]) -> Node:
    """The sum of terms, pair by pair: short chains, that a processor overlaps."""
    while len(terms) > 1:
        terms = [call(aten.add.Tensor, left, right) for left, right in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def masked(call: CallBuilder, scores: Node, mask: Node) -> Node:
    """Scores under a mask of bools, where True counts, or of numbers to add."""
    if mask.meta["val"].dtype != torch.bool:
        return call(aten.add.Tensor, scores, mask)
    return call(aten.masked_fill.Scalar, scores, call(aten.logical_not.default, mask), float("-inf"))


def output_of(call: CallBuilder, weights: Node, total: Node, read: StoredRead) -> Node:
    """``e·V / Σ e  [B, H, G, D]`` less the zero point."""
    numerator = weights
    if read.scale is not None:
        numerator = call(aten.mul.Tensor, weights, call(aten.transpose.int, read.scale, 2, 3))
    batch, heads, length, width = (int(size) for size in read.loaded.meta["val"].shape)
    block = BLOCK if length % BLOCK == 0 else length
    words = int32_words(call, read.loaded)
    words = call(aten.view.default, words, [batch, heads, length // block, block, width // LANES])
    codes = _codes(call, words, read)
    groups = int(weights.meta["val"].shape[2])
    blocks = call(aten.view.default, numerator, [batch, heads, groups, length // block, block, 1])
    rows = []
    for group in range(groups):
        row = call(aten.select.int, blocks, 2, group)
        sums = [
            call(aten.sum.dim_IntList, call(aten.sum.dim_IntList, call(aten.mul.Tensor, row, code), [3]), [2])
            for code in codes
        ]
        halves = [
            call(aten.reshape.default, call(aten.stack.default, sums[start : start + LANES], -1), [batch, heads, width])
            for start in range(0, len(sums), LANES)
        ]
        rows.append(halves[0] if len(halves) == 1 else call(aten.cat.default, halves, -1))
    out = call(aten.stack.default, rows, 2)
    if read.shift is not None and read.scale is not None:  # per token
        lost = call(aten.mul.Tensor, numerator, call(aten.transpose.int, read.shift, 2, 3))
        out = call(aten.sub.Tensor, out, call(aten.sum.dim_IntList, lost, [-1], True))
    out = call(aten.div.Tensor, out, total)
    return call(aten.sub.Tensor, out, read.shift) if read.shift is not None and read.scale is None else out
