"""Number formats: their codes, storage, bounds, and what is refused."""

import pytest
import torch

from graphquant.errors import ConfigError, StrategyError
from graphquant.numerics import QuantDtype, quant_dtype
from tests.numerics.sites import E4M3, E5M2, FLOATS, INTEGERS


@pytest.mark.parametrize("bits", range(2, 9))
def test_an_integer_format_has_every_code_of_its_bits(bits: int) -> None:
    signed, unsigned = quant_dtype("int", bits), quant_dtype("uint", bits)
    assert (signed.qmin, signed.qmax) == (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert (unsigned.qmin, unsigned.qmax) == (0, 2**bits - 1)
    assert (signed.storage, unsigned.storage) == (torch.int8, torch.uint8)
    assert (signed.name, unsigned.name) == (f"int{bits}", f"uint{bits}")
    assert signed.num_bits == unsigned.num_bits == bits


def test_the_symmetric_bound_of_integers_is_half_the_code_range() -> None:
    assert quant_dtype("int", 8).symmetric_bound == 127.5
    assert quant_dtype("uint", 8).symmetric_bound == 127.5
    assert quant_dtype("int", 4).symmetric_bound == 7.5
    assert quant_dtype("int", 2).symmetric_bound == 1.5


def test_the_symmetric_zero_point_is_0_or_the_middle_of_an_unsigned_range() -> None:
    assert [quant_dtype("int", bits).symmetric_zero_point for bits in (2, 4, 8)] == [0, 0, 0]
    assert [quant_dtype("uint", bits).symmetric_zero_point for bits in (2, 4, 8)] == [2, 8, 128]
    assert [fp8.symmetric_zero_point for fp8 in FLOATS] == [0, 0]


def test_fp8_reaches_its_largest_finite_value() -> None:
    assert (E4M3.name, E4M3.qmin, E4M3.qmax, E4M3.storage) == ("fp8_e4m3", -448.0, 448.0, torch.float8_e4m3fn)
    assert (E5M2.name, E5M2.qmin, E5M2.qmax, E5M2.storage) == ("fp8_e5m2", -57344.0, 57344.0, torch.float8_e5m2)
    assert (E4M3.symmetric_bound, E5M2.symmetric_bound) == (448.0, 57344.0)
    assert quant_dtype("float", 8) == E4M3


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS, ids=lambda dtype: dtype.name)
def test_every_end_of_a_format_is_a_value_of_its_storage(dtype: QuantDtype) -> None:
    ends = torch.tensor([dtype.qmin, 0.0, dtype.qmax])
    assert torch.equal(ends.to(dtype.storage).float(), ends)
    assert dtype.is_float == (dtype in FLOATS)
    assert dtype.qmin <= dtype.symmetric_zero_point <= dtype.qmax


@pytest.mark.parametrize(
    ("type_", "bits", "float_format"),
    [
        *[("int", 0, "e4m3"), ("int", 1, "e4m3"), ("int", 9, "e4m3"), ("uint", 16, "e4m3"), ("uint", -8, "e4m3")],
        *[("float", 4, "e4m3"), ("float", 16, "e4m3"), ("float", 8, "e3m4"), ("bool", 8, "e4m3")],
    ],
)
def test_another_format_is_refused_by_name(type_: str, bits: int, float_format: str) -> None:
    with pytest.raises(StrategyError) as refusal:
        quant_dtype(type_, bits, float_format)
    assert str(refusal.value) == (
        f"no number format has type {type_!r}, num_bits {bits} and float format {float_format!r}; there are int and "
        "uint with 2 to 8 bits, and float with 8 bits as e4m3 or e5m2"
    )
    assert isinstance(refusal.value, ConfigError)
