"""How the caches of keys and values lie in memory for lanes, in the place of ``[B, H, L, W]``, W bytes a token.

Two shapes, both such that one token of attention reads its cache from end to end, as a processor reads ahead best:

- tiles ``[B, H, N, W/4, T, 4]``: N tiles of T tokens, and in a tile four bytes of every token behind one another;
- chunks ``[B, H, W/64, L, 64]``: as many bytes of a token as the widest vector has, and then of the next token.

Keys lie in tiles of 32 tokens: a score is a sum over W, tokens are lanes. Values, whose sum is over tokens, lie in
chunks, where bytes are lanes; those that no chunks divide lie in tiles of up to 1024 tokens. A length that no tile
divides is one tile.
"""

from torch import Tensor

LANES = 4
"""Codes, or bytes of codes, in an int32."""
CHUNK = 64
"""Bytes of a chunk: sixteen int32, the widest vector of today's processors."""
KEY_TILES, BLOCK, SHORTEST = (32, 16), 1024, 256
"""Tokens of a tile of keys; tokens of a block of values: few enough to stay near, enough to be worth its overhead."""

Shape = tuple[int, ...]


def key_shape(shape: Shape) -> Shape:
    """The shape of a cache of keys ``[B, H, L, W]`` in lanes: tiles, or one where no tile divides the length."""
    length = shape[2]
    return _tiles(shape, next((tokens for tokens in KEY_TILES if length % tokens == 0), length))


def value_shape(shape: Shape) -> Shape:
    """The shape of a cache of values ``[B, H, L, W]`` in lanes: chunks or, where they do not divide W, tiles."""
    batch, heads, length, width = shape
    if width % CHUNK == 0:
        return (batch, heads, width // CHUNK, length, CHUNK)
    return _tiles(shape, length // blocks(length))


def is_tiles(shape: Shape) -> bool:
    """Whether a shape in lanes is one of tiles; else of chunks."""
    return len(shape) == 6


def blocks(length: int) -> int:
    """How many blocks of the largest size that is not too long a length has; where only short ones divide it, one."""
    size = next(size for size in range(min(length, BLOCK), 0, -1) if length % size == 0)
    return length // size if size >= SHORTEST else 1


def carries(shape: Shape, lanes: Shape) -> bool:
    """Whether a cache ``[B, H, L, W]`` of a shape becomes one in lanes of another shape."""
    return len(shape) == 4 and tuple(lanes) in (key_shape(shape), value_shape(shape))


def arranged(cache: Tensor, shape: Shape) -> Tensor:
    """A cache ``[B, H, L, W]`` as it lies in lanes of ``shape``; a view of it."""
    if is_tiles(shape):
        batch, heads, count, words, tokens, lanes = shape
        return cache.reshape(batch, heads, count, tokens, words, lanes).transpose(3, 4)
    batch, heads, count, length, width = shape
    return cache.reshape(batch, heads, length, count, width).transpose(2, 3)


def _tiles(shape: Shape, tokens: int) -> Shape:
    batch, heads, length, width = shape
    return (batch, heads, length // tokens, width // LANES, tokens, LANES)
