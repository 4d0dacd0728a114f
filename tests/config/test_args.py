"""QuantizationArgs: what it fills in, what it refuses and in which words, and its JSON form."""

import copy
import json
import pickle
import re
from dataclasses import FrozenInstanceError, replace
from enum import Enum

import pytest
import torch
from hypothesis import given

from graphquant.config import QuantizationArgs
from graphquant.errors import ConfigError, StrategyError
from tests.config.generated import args, law

KNOWN = "num_bits, type, symmetric, strategy, group_size, dynamic, observer, observer_kwargs, float_format"


class Strategy(str, Enum):  # noqa: UP042  the way compressed-tensors writes its enums
    GROUP = "group"


@law
@given(args())
def test_json_form_reads_back_equal(made: QuantizationArgs) -> None:
    again = QuantizationArgs.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert hash(again) == hash(made)
    assert again.to_dict() == made.to_dict()


@law
@given(args())
def test_an_instance_is_a_value(made: QuantizationArgs) -> None:
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    assert eval(repr(made)) == made
    assert replace(made) == made


@law
@given(args())
def test_token_is_dynamic_and_nothing_else_is(made: QuantizationArgs) -> None:
    assert made.dynamic is (made.strategy == "token")
    assert made.dtype.num_bits == made.num_bits
    assert made.dtype.type == made.type


def test_defaults_are_int8_symmetric_per_tensor() -> None:
    assert QuantizationArgs.from_dict({}) == QuantizationArgs()
    assert QuantizationArgs().to_dict() == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "tensor",
        "group_size": None,
        "dynamic": False,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def test_float_format_is_written_only_where_it_is_not_the_default() -> None:
    assert "float_format" not in QuantizationArgs(type="float").to_dict()
    assert QuantizationArgs(type="float", float_format="e5m2").to_dict()["float_format"] == "e5m2"
    assert QuantizationArgs(type="float", float_format="e5m2").dtype.storage is torch.float8_e5m2


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (QuantizationArgs(strategy="attn_head"), "int8 sym attn_head"),
        (QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=32), "int4 asym group(32)"),
        (QuantizationArgs(type="float"), "fp8_e4m3 tensor"),
        (QuantizationArgs(type="float", float_format="e5m2", strategy="channel"), "fp8_e5m2 channel"),
        (QuantizationArgs(type="uint", symmetric=False, strategy="token"), "uint8 asym token dynamic"),
    ],
)
def test_summary(made: QuantizationArgs, words: str) -> None:
    assert made.summary() == words


def test_a_group_size_alone_means_group() -> None:
    assert QuantizationArgs.from_dict({"group_size": 16}) == QuantizationArgs(strategy="group", group_size=16)
    assert QuantizationArgs.from_dict({"group_size": 16, "strategy": None}).strategy == "group"


def test_reads_what_compressed_tensors_writes() -> None:
    written: dict[str, object] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": None,
        "observer_kwargs": {},
        "scale_dtype": "torch.float32",
        "strategy": "ATTN_HEAD",
        "symmetric": True,
        "type": "Float",
        "zp_dtype": None,
    }
    assert QuantizationArgs.from_dict(written) == QuantizationArgs(type="float", strategy="attn_head")
    nulls = dict.fromkeys(("strategy", "dynamic", "observer", "observer_kwargs", "group_size", "scale_dtype"))
    assert QuantizationArgs.from_dict(nulls) == QuantizationArgs()


def test_str_enums_become_plain_strings() -> None:
    made = QuantizationArgs(strategy=Strategy.GROUP, group_size=8)
    assert type(made.strategy) is str
    assert made.strategy == "group"


def test_observer_none_means_the_default() -> None:
    assert QuantizationArgs(observer=None).observer == "minmax"  # type: ignore[arg-type]


def test_an_instance_cannot_be_changed_from_outside() -> None:
    kwargs = {"percentile": 99.0}
    made = QuantizationArgs(observer="percentile", observer_kwargs=kwargs)
    kwargs["percentile"] = 1.0
    assert made.observer_kwargs == {"percentile": 99.0}
    with pytest.raises(TypeError, match="does not support item assignment"):
        made.observer_kwargs["percentile"] = 1.0  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        made.num_bits = 4  # type: ignore[misc]


REFUSED = [
    ({"num_bit": 8}, f"unknown key 'num_bit'; did you mean 'num_bits'? (known: {KNOWN})"),
    ({"wholly_other": 8}, f"unknown key 'wholly_other' (known: {KNOWN})"),
    ({"act_order": None}, f"unknown key 'act_order'; did you mean 'actorder'? (known: {KNOWN})"),
    ({"num_bits": True}, "num_bits must be an integer, not True"),
    ({"num_bits": "8"}, "num_bits must be an integer, not '8'"),
    ({"num_bits": None}, "num_bits must be an integer, not None"),
    ({"num_bits": 8.0}, "num_bits must be an integer, not 8.0"),
    ({"type": "integer"}, "type must be one of int, uint, float, not 'integer'; did you mean 'int'?"),
    ({"type": None}, "type must be one of int, uint, float, not None"),
    ({"type": ["int"]}, "type must be one of int, uint, float, not ['int']; did you mean 'int'?"),
    ({"symmetric": "yes"}, "symmetric must be true or false, not 'yes'"),
    ({"symmetric": 1}, "symmetric must be true or false, not 1"),
    (
        {"dynamic": "local"},
        "dynamic must be true, false or null, not 'local' (compressed-tensors' 'local' is not built)",
    ),
    ({"dynamic": 0}, "dynamic must be true, false or null, not 0"),
    ({"observer": 3}, "observer must be a name, not 3"),
    ({"observer": "minmx"}, "unknown observer 'minmx'; there are minmax, moving_average, percentile, mse"),
    ({"observer_kwargs": [1]}, "observer_kwargs must be a mapping, not [1]"),
    ({"observer_kwargs": {"percentile": 99}}, "observer 'minmax' has no argument 'percentile'; it has none"),
    (
        {"observer": "percentile", "observer_kwargs": {"percentile": 101}},
        "observer 'percentile': percentile must be a number above 50.0 and at most 100.0, not 101",
    ),
    (
        {"type": "float", "float_format": "e3m4"},
        "float_format must be one of e4m3, e5m2, not 'e3m4'",
    ),
    ({"float_format": "e5m2"}, "float_format 'e5m2' needs type float, not 'int'"),
    ({"float_format": "e4m3"}, "float_format 'e4m3' needs type float, not 'int'"),
    (
        {"block_structure": [128, 128]},
        "block_structure [128, 128] is not supported: leave it out, or set it null",
    ),
    ({"actorder": "weight"}, "actorder 'weight' is not supported: leave it out, or set it null"),
    ({"zp_dtype": "torch.int8"}, "zp_dtype 'torch.int8' is not supported: leave it out, or set it null"),
    (
        {"scale_dtype": "torch.float16"},
        "scale_dtype 'torch.float16' is not supported; scales are always float32: leave it out, or set it null",
    ),
    ([8], "expected a mapping (quantization args), found list [8]"),
    ("int8", "expected a mapping (quantization args), found str 'int8'"),
    (None, "expected a mapping (quantization args), found NoneType None"),
    ({8: 8}, "expected string keys (quantization args), found int 8; quote it"),
]

_STRATEGIES = "tensor, channel, attn_head, attn_head_channel, group, token"
REFUSED_STRATEGIES = [
    ({"strategy": "block"}, f"strategy 'block' is not built yet; use one of {_STRATEGIES}"),
    ({"strategy": "tensor_group"}, f"strategy 'tensor_group' is not built yet; use one of {_STRATEGIES}"),
    ({"strategy": "chanel"}, f"unknown strategy 'chanel'; did you mean 'channel'? (known: {_STRATEGIES})"),
    ({"strategy": 1}, f"strategy must be one of {_STRATEGIES}, not 1"),
    ({"strategy": "group"}, "strategy 'group' needs a group_size that is an integer above 0, not None"),
    ({"group_size": 0}, "strategy 'group' needs a group_size that is an integer above 0, not 0"),
    ({"group_size": True}, "strategy 'group' needs a group_size that is an integer above 0, not True"),
    ({"group_size": "32"}, "strategy 'group' needs a group_size that is an integer above 0, not '32'"),
    (
        {"group_size": 32, "strategy": "channel"},
        "group_size 32 is given with strategy 'channel', which has no groups; leave it out, or use strategy 'group'",
    ),
    (
        {"dynamic": True},
        "dynamic true needs strategy 'token'; the scales of 'tensor' are static: leave dynamic out",
    ),
    (
        {"dynamic": False, "strategy": "token"},
        "strategy 'token' is always dynamic: leave dynamic out, or set it true",
    ),
    (
        {"type": "float", "symmetric": False},
        "type float (fp8) has no zero point: set symmetric true, or use type int or uint",
    ),
    ({"num_bits": 1}, "no number format has type 'int', num_bits 1 and float format 'e4m3'"),
    ({"num_bits": 4, "type": "float"}, "no number format has type 'float', num_bits 4 and float format 'e4m3'"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_refuses_in_one_clear_line(data: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        QuantizationArgs.from_dict(data)
    with pytest.raises(ConfigError, match=f"^key_states: {re.escape(message)}$"):
        QuantizationArgs.from_dict(data, "key_states")


@pytest.mark.parametrize(("data", "message"), REFUSED_STRATEGIES)
def test_refuses_strategies_and_formats_as_strategy_errors(data: object, message: str) -> None:
    with pytest.raises(StrategyError, match=f"^{re.escape(message)}"):
        QuantizationArgs.from_dict(data)
    with pytest.raises(StrategyError, match=f"^a.b: {re.escape(message)}"):
        QuantizationArgs.from_dict(data, "a.b")


def test_the_constructor_refuses_a_group_size_without_group() -> None:
    with pytest.raises(StrategyError, match=r"^group_size 32 is given with strategy 'tensor'"):
        QuantizationArgs(group_size=32)
