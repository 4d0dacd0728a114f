"""Number formats: the codes a format has, the tensor dtype that stores them, the bound of its scale.

Invariant: every code of a format is a value of its ``storage`` dtype, and ``qmin <= 0 <= qmax`` or the format's
``symmetric_zero_point`` lies between them.
"""

from dataclasses import dataclass

import torch

from graphquant.errors import StrategyError

TYPES = ("int", "uint", "float")
FLOAT_FORMATS = ("e4m3", "e5m2")
_FLOAT_STORAGE = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, kw_only=True)
class QuantDtype:
    """A number format: ``qmin`` and ``qmax`` are its lowest and highest code (a real value for fp8)."""

    name: str
    type: str
    num_bits: int
    qmin: float
    qmax: float
    storage: torch.dtype

    @property
    def is_float(self) -> bool:
        """Whether codes are floating-point values, so that rounding is the cast's own."""
        return self.type == "float"

    @property
    def symmetric_bound(self) -> float:
        """The code that max(|min|, |max|) maps to before rounding: scale = amax / symmetric_bound.

        Half of the code range for integers (127.5 for int8, as compressed-tensors and PT2E have it), the largest
        finite value for fp8 (448 for e4m3fn, 57344 for e5m2).
        """
        return self.qmax if self.is_float else (self.qmax - self.qmin) / 2

    @property
    def symmetric_zero_point(self) -> int:
        """The code of real 0 in a symmetric scheme: 0, or the middle of an unsigned range (128 for uint8)."""
        return int(self.qmax + 1) // 2 if self.type == "uint" else 0


def quant_dtype(type: str, num_bits: int, float_format: str = "e4m3") -> QuantDtype:
    """The number format of compressed-tensors' ``type`` and ``num_bits``.

    Raises:
        StrategyError: the combination is not one of int2…int8, uint2…uint8, float 8 (e4m3, e5m2).
    """
    if type == "int" and 2 <= num_bits <= 8:
        half = 2 ** (num_bits - 1)
        return QuantDtype(
            name=f"int{num_bits}", type=type, num_bits=num_bits, qmin=-half, qmax=half - 1, storage=torch.int8
        )
    if type == "uint" and 2 <= num_bits <= 8:
        return QuantDtype(
            name=f"uint{num_bits}", type=type, num_bits=num_bits, qmin=0, qmax=2**num_bits - 1, storage=torch.uint8
        )
    if type == "float" and num_bits == 8 and float_format in FLOAT_FORMATS:
        storage = _FLOAT_STORAGE[float_format]
        top = torch.finfo(storage).max
        return QuantDtype(name=f"fp8_{float_format}", type=type, num_bits=8, qmin=-top, qmax=top, storage=storage)
    raise StrategyError(
        f"no number format has type {type!r}, num_bits {num_bits} and float format {float_format!r}; there are int and "
        "uint with 2 to 8 bits, and float with 8 bits as e4m3 or e5m2"
    )
