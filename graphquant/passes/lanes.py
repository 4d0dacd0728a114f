"""One-token attention over a stored cache in the form that Inductor turns into the fastest loops.

Its loads of int8 are slow, and a row of keys is a sum across lanes. So four codes are loaded as one int32 and taken
apart by shifts, and the caches lie such that lanes are never summed and memory is read from end to end
(``lane_layouts``). The query heads that share a KV head read each code once:

    s[g, n, t] = Σ_c Σ_j q[g, 4c + j] · code_j(K[n, c, t])
    o[g, 4c + j] = Σ_l e[g, l] · code_j(V[l, c]) / Σ_l e[g, l]

with e = exp(s − max s). What is subtracted from all codes of a channel, a static zero point or the lowest code of two
in a byte, is for keys the same at every l of a query, which softmax does not see, and for values, times Σ e, is
subtracted from the numerator. A scale per token multiplies s, and e in the numerator.
"""

import torch
from torch.fx import Node

from graphquant.passes.editor import CallBuilder
from graphquant.passes.lane_layouts import LANES
from graphquant.passes.stored_reads import StoredRead

aten = torch.ops.aten


def int32_words(call: CallBuilder, codes: Node) -> Node:
    """Four codes as one int32; by way of float32, which Inductor loads as whole vectors where int32 it does not."""
    return call(aten.view.dtype, call(aten.view.dtype, codes, torch.float32), torch.int32)


def kept(call: CallBuilder, x: Node) -> Node:
    """``x`` in memory of its own: Inductor computes it once, and not again inside of the loops that read it."""
    whole = call(aten.clone.default, x, memory_format=torch.contiguous_format)
    value = whole.meta["val"]
    return call(aten.as_strided.default, whole, list(value.shape), list(value.stride()))


def _codes(call: CallBuilder, words: Node, read: StoredRead) -> list[Node]:
    """The codes in int32 words as float32, byte 0 to 3; of packed ones, less the lowest, the low halves first."""
    dtype = read.args.dtype
    if dtype.num_bits > 4:
        signed = dtype.type == "int"
        shifts = [(24 - 8 * byte, 24) if signed else (8 * byte, None) for byte in range(LANES)]
        return [_signed(call, words, *shift) if signed else _bits(call, words, shift[0], 255) for shift in shifts]
    return [_bits(call, words, 8 * byte + half, 15) for half in (0, 4) for byte in range(LANES)]


def _shift(call: CallBuilder, read: StoredRead) -> Node | float:
    """What is subtracted from ``_codes``: the zero point, as packed codes count from their lowest."""
    dtype = read.args.dtype
    lowest = float(dtype.qmin) if dtype.num_bits <= 4 else 0.0
    if read.shift is None:
        return -lowest
    return call(aten.sub.Tensor, read.shift, lowest) if lowest else read.shift


def _signed(call: CallBuilder, words: Node, left: int, right: int) -> Node:
    up = call(aten.__lshift__.Scalar, words, left) if left else words
    return call(aten._to_copy.default, call(aten.__rshift__.Scalar, up, right), dtype=torch.float32)


def _bits(call: CallBuilder, words: Node, right: int, mask: int) -> Node:
    down = call(aten.__rshift__.Scalar, words, right) if right else words
    return call(aten._to_copy.default, call(aten.bitwise_and.Scalar, down, mask), dtype=torch.float32)


def scores_of(call: CallBuilder, query: Node, words: Node, read: StoredRead) -> Node:
    """Q·Kᵀ ``[B, H, G, L]`` for ``words [B, H, N, W/4, T]`` of keys, less what softmax does not see."""
    q, codes = kept(call, query), _codes(call, words, read)
    batch, heads = (int(size) for size in words.meta["val"].shape[:2])
    rows = []
    for group in range(int(q.meta["val"].shape[2])):
        row = call(aten.select.int, q, 2, group)
        factors = _by_code(call, row, len(codes))
        products = [call(aten.mul.Tensor, factor, code) for factor, code in zip(factors, codes, strict=True)]
        sums = call(aten.sum.dim_IntList, _tree(call, products), [3])
        rows.append(call(aten.view.default, sums, [batch, heads, -1]))
    scores = call(aten.stack.default, rows, 2)
    if read.scale is None:
        return scores
    shift = _shift(call, read)  # softmax sees it, times the scale of a token
    if shift != 0:
        whole = call(aten.sum.dim_IntList, q, [-1], True)
        lost = call(aten.mul.Tensor, whole, _by_token(call, shift))
        scores = call(aten.sub.Tensor, scores, lost)
    return call(aten.mul.Tensor, scores, _by_token(call, read.scale))


def _by_token(call: CallBuilder, factor: Node | float) -> Node | float:
    """A number per token ``[B, H, L, 1]`` beside scores ``[B, H, G, L]``."""
    return call(aten.transpose.int, factor, 2, 3) if isinstance(factor, Node) else factor


def _by_code(call: CallBuilder, row: Node, count: int) -> list[Node]:
    """The channels of ``row [B, H, D]`` that go with each of the codes of a word, ``[B, H, 1, W/4, 1]``."""
    width = int(row.meta["val"].shape[-1])
    halves = count // LANES
    parts = [
        call(aten.slice.Tensor, row, -1, half * width // halves + byte, (half + 1) * width // halves, LANES)
        for half in range(halves)
        for byte in range(LANES)
    ]
    return [call(aten.unsqueeze.default, call(aten.unsqueeze.default, part, -1), 2) for part in parts]


def _tree(call: CallBuilder, terms: list[Node]) -> Node:
    """The sum of terms, pair by pair: short chains, that a processor overlaps."""
    while len(terms) > 1:
        terms = [call(aten.add.Tensor, left, right) for left, right in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def masked(call: CallBuilder, scores: Node, mask: Node) -> Node:
    """Scores under a mask of bools, where True counts, or of numbers to add; one mask serves all heads."""
    if mask.meta["val"].dtype == torch.bool:
        nothing = call(aten.zeros_like.default, mask, dtype=torch.float32)
        mask = call(aten.masked_fill.Scalar, nothing, call(aten.logical_not.default, mask), float("-inf"))
    return call(aten.add.Tensor, scores, kept(call, mask))


def output_of(call: CallBuilder, weights: Node, words: Node, read: StoredRead) -> Node:
    """``e·V / Σ e  [B, H, G, D]`` of words: tiles ``[B, H, N, W/4, T]`` or chunks ``[B, H, M, N, T, 16]``."""
    scaled, total = weights, call(aten.sum.dim_IntList, weights, [-1], True)
    if read.scale is not None:
        scaled = call(aten.mul.Tensor, weights, _by_token(call, read.scale))
    codes, sizes = _codes(call, words, read), [int(size) for size in words.meta["val"].shape]
    rows = []
    for group in range(int(weights.meta["val"].shape[2])):
        row = call(aten.select.int, scaled, 2, group)
        sums = [_summed(call, call(aten.mul.Tensor, _beside(call, row, sizes), code)) for code in codes]
        halves = [
            call(aten.view.default, call(aten.stack.default, sums[start : start + LANES], -1), [*sizes[:2], -1])
            for start in range(0, len(sums), LANES)
        ]
        rows.append(halves[0] if len(halves) == 1 else call(aten.cat.default, halves, -1))
    out, shift = call(aten.stack.default, rows, 2), _shift(call, read)
    if shift != 0:
        if read.scale is None:
            lost = call(aten.mul.Tensor, total, shift)
        else:
            lost = call(aten.sum.dim_IntList, call(aten.mul.Tensor, scaled, _by_token(call, shift)), [-1], True)
        out = call(aten.sub.Tensor, out, lost)
    # The largest weight is 1, so a sum below 1 is one of nothing.
    return call(aten.div.Tensor, out, call(aten.clamp_min.default, total, 1.0))


_BLOCKS = {5: (2, 4), 6: (3, 4)}
"""Dims N and T, blocks and their tokens, of words of values by how many dims those have: tiles, chunks."""


def _beside(call: CallBuilder, row: Node, sizes: list[int]) -> Node:
    """Weights ``[B, H, L]`` as they multiply words of values of these sizes."""
    view = [size if dim in (0, 1, *_BLOCKS[len(sizes)]) else 1 for dim, size in enumerate(sizes)]
    return call(aten.view.default, row, view)


def _summed(call: CallBuilder, products: Node) -> Node:
    """The sum over the tokens of each block, and over blocks."""
    count, tokens = _BLOCKS[products.meta["val"].dim()]
    return call(aten.sum.dim_IntList, call(aten.sum.dim_IntList, products, [tokens]), [count])
