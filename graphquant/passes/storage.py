"""How codes lie in a cache: one byte each, or two codes of at most 4 bits in one byte.

Of the last dim, W wide, the first half goes into the low four bits and the second half into the high four, so that
each half is a run of codes. The arithmetic is in float32, which holds every byte exactly and every compiler knows:

    byte = (first − qmin) + 16 · (second − qmin)        high = floor(byte / 16)        low = byte − 16 · high

fp8 lies in a buffer as its bits (uint8): torch has no index_copy of fp8 on CPUs.
"""

from dataclasses import dataclass

import torch
from torch.fx import Node

from graphquant.config import QuantizationArgs
from graphquant.errors import ConvertError
from graphquant.numerics import QuantDtype
from graphquant.passes.editor import CallBuilder

aten = torch.ops.aten
PACKED_UP_TO = 4
"""Bits of the widest codes that lie two to a byte."""


@dataclass(frozen=True)
class Storage:
    """How the codes of ``args`` lie in a cache whose last dim is ``width`` codes."""

    codes: QuantDtype
    width: int
    as_bits: bool

    @classmethod
    def of(cls, args: QuantizationArgs, width: int, *, is_buffer: bool, where: str) -> "Storage":
        """The storage of a site's codes.

        Raises:
            ConvertError: codes that lie two to a byte, and an odd number of them.
        """
        storage = cls(args.dtype, width, is_buffer and args.dtype.is_float)
        if storage.packed and width % 2:
            raise ConvertError(
                f"{where}: {args.dtype.name} is stored two codes to a byte, and its last dim {width} is odd: use 5 to "
                "8 bits"
            )
        return storage

    @property
    def packed(self) -> bool:
        """Whether two codes share a byte."""
        return self.codes.num_bits <= PACKED_UP_TO

    @property
    def dtype(self) -> torch.dtype:
        """What the cache holds."""
        return torch.uint8 if self.packed or self.as_bits else self.codes.storage

    @property
    def stored_width(self) -> int:
        """The last dim of the cache."""
        return self.width // 2 if self.packed else self.width

    def store(self, call: CallBuilder, codes: Node, name: str) -> Node:
        """Float32 codes as the cache holds them."""
        if self.packed:
            low, high = (
                call(aten.sub.Tensor, call(aten.slice.Tensor, codes, -1, *ends), self.codes.qmin)
                for ends in self._halves
            )
            codes = call(aten.add.Tensor, low, call(aten.mul.Tensor, high, 16.0))
        if self.as_bits:
            codes = call(aten._to_copy.default, codes, dtype=self.codes.storage)
            return call(aten.view.dtype, codes, torch.uint8, name=name)
        return call(aten._to_copy.default, codes, dtype=self.dtype, name=name)

    def load(self, call: CallBuilder, stored: Node) -> Node:
        """What the cache holds as float32 codes."""
        if self.as_bits:
            stored = call(aten.view.dtype, stored, self.codes.storage)
        values = call(aten._to_copy.default, stored, dtype=torch.float32)
        if not self.packed:
            return values
        high = call(aten.floor.default, call(aten.mul.Tensor, values, 0.0625))
        low = call(aten.sub.Tensor, values, call(aten.mul.Tensor, high, 16.0))
        codes = call(aten.cat.default, [low, high], -1)
        return call(aten.add.Tensor, codes, self.codes.qmin) if self.codes.qmin else codes

    @property
    def _halves(self) -> tuple[tuple[int, int], tuple[int, int]]:
        return (0, self.width // 2), (self.width // 2, self.width)
