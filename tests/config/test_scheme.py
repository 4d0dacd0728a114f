"""Schemes and targets: round trips, and each refusal in its words."""

import json
import re
from typing import Any

import pytest
from hypothesis import given

from graphquant.config import ROLE_TARGETS, KVCacheScheme, QuantizationArgs, QuantizationScheme, check_targets
from graphquant.errors import ConfigError, SelectorError
from tests.config.generated import kv_schemes, law, schemes, targets

INT8 = QuantizationArgs()
INT4 = QuantizationArgs(num_bits=4)
SCHEME_KEYS = "targets, weights, input_activations, output_activations, query_states, key_states, value_states"
ARG_KEYS = "num_bits, type, symmetric, strategy, group_size, dynamic, observer, observer_kwargs, float_format"


@law
@given(schemes())
def test_scheme_reads_back_equal(scheme: QuantizationScheme) -> None:
    again = QuantizationScheme.from_dict(json.loads(json.dumps(scheme.to_dict())))
    assert again == scheme
    assert hash(again) == hash(scheme)


@law
@given(kv_schemes())
def test_kv_cache_scheme_reads_back_equal(scheme: KVCacheScheme) -> None:
    assert KVCacheScheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme


@law
@given(targets)
def test_every_generated_target_is_accepted(target: str) -> None:
    check_targets([target])


def test_scheme_json_form_is_compressed_tensors_plus_the_states_that_are_given() -> None:
    projection = QuantizationScheme(targets=("Linear",), output_activations=INT8)
    assert projection.to_dict() == {
        "targets": ["Linear"],
        "weights": None,
        "input_activations": None,
        "output_activations": INT8.to_dict(),
    }
    assert "query_states" not in QuantizationScheme(targets=("x",), key_states=INT8).to_dict()
    assert QuantizationScheme(targets=("x",), key_states=INT8).to_dict()["key_states"] == INT8.to_dict()


def test_targets_may_be_a_list_or_a_single_string() -> None:
    made = QuantizationScheme.from_dict({"targets": "Linear", "input_activations": {}})
    assert made == QuantizationScheme(targets=["Linear"], input_activations=INT8)  # type: ignore[arg-type]
    assert made.targets == ("Linear",)


@pytest.mark.parametrize("format", [None, "dense"])
def test_format_dense_is_read_and_dropped(format: str | None) -> None:
    made = QuantizationScheme.from_dict({"targets": ["x"], "format": format, "key_states": {}})
    assert made == QuantizationScheme(targets=("x",), key_states=INT8)


def test_kv_cache_scheme_forms() -> None:
    assert KVCacheScheme.from_dict({"num_bits": 4}) == KVCacheScheme(key=INT4, value=INT4)
    assert KVCacheScheme.from_dict({"key": {"num_bits": 4}, "value": {}}) == KVCacheScheme(key=INT4, value=INT8)
    assert KVCacheScheme.from_dict({"key": None, "value": {}}) == KVCacheScheme(value=INT8)
    assert KVCacheScheme(key=INT4, value=INT4).to_dict() == INT4.to_dict()
    assert KVCacheScheme(value=INT4).to_dict() == {"value": INT4.to_dict()}


REFUSED: list[tuple[Any, str]] = [
    ({"target": ["x"]}, f"s: unknown key 'target'; did you mean 'targets'? (known: {SCHEME_KEYS})"),
    ({"key_state": {}}, f"s: unknown key 'key_state'; did you mean 'key_states'? (known: {SCHEME_KEYS})"),
    (
        {"targets": ["x"], "key_states": {"num_bit": 4}},
        f"s.key_states: unknown key 'num_bit'; did you mean 'num_bits'? (known: {ARG_KEYS})",
    ),
    ({"input_activations": {}}, "s: targets is empty; name at least one module path, class name, re:… or role:…"),
    (
        {"targets": [], "input_activations": {}},
        "s: targets is empty; name at least one module path, class name, re:… or role:…",
    ),
    ({"targets": [1], "input_activations": {}}, "s: targets must be a string or a list of strings, not [1]"),
    ({"targets": {"a": 1}}, "s: targets must be a string or a list of strings, not {'a': 1}"),
    (
        {"targets": ["re:("], "input_activations": {}},
        "s: target 're:(' is no regular expression: missing ), unterminated subpattern at position 0",
    ),
    (
        {"targets": ["x"], "weights": {"num_bits": 4}},
        "s: weights is refused until it is built: only activations and states are quantized",
    ),
    (
        {"targets": ["x"], "format": "pack-quantized", "input_activations": {}},
        "s: format 'pack-quantized' is not supported: leave it out, or set it null or 'dense'",
    ),
    (
        {"targets": ["x"]},
        "s: nothing to quantize: give at least one of input_activations, output_activations, query_states, key_states, "
        "value_states",
    ),
    (
        {"targets": ["x"], "input_activations": {}, "key_states": {}, "value_states": {}},
        "s: input_activations and key_states, value_states are both given; on an attention module input_activations "
        "means all three states: give one or the other",
    ),
    (["x"], "s: expected a mapping (a quantization scheme), found list ['x']"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_scheme_refuses_in_one_clear_line(data: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        QuantizationScheme.from_dict(data, "s")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"key": {}, "vlaue": {}}, "kv: unknown key 'vlaue'; did you mean 'value'? (known: key, value)"),
        ({"key": {}, "num_bits": 8}, "kv: unknown key 'num_bits' (known: key, value)"),
        ({"key": None}, "kv: nothing to quantize: give at least one of key, value"),
        ({"key": {"num_bits": "4"}}, "kv.key: num_bits must be an integer, not '4'"),
        ({"num_bits": "4"}, "kv: num_bits must be an integer, not '4'"),
        (8, "kv: expected a mapping (a KV cache scheme), found int 8"),
    ],
)
def test_kv_cache_scheme_refuses_in_one_clear_line(data: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        KVCacheScheme.from_dict(data, "kv")


def test_constructors_refuse_plain_data() -> None:
    with pytest.raises(
        ConfigError, match=r"^key must be QuantizationArgs, not dict; KVCacheScheme.from_dict reads plain"
    ):
        KVCacheScheme(key={"num_bits": 8})  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"^key_states must be QuantizationArgs, not str; QuantizationScheme.from_dict"
    ):
        QuantizationScheme(targets=("x",), key_states="int8")  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["", "re:", "role:"])
def test_an_empty_target_is_refused(target: str) -> None:
    message = f"target {target!r} is empty; give a module path, a class name, re:… or role:…"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check_targets([target])


def test_a_regular_expression_too_large_to_compile_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is no regular expression: the repetition number is too large$"):
        check_targets(["re:a{99999999999999999999}"])


def test_an_unknown_role_is_a_selector_error() -> None:
    known = re.escape(f"(known: {', '.join(ROLE_TARGETS)})")
    with pytest.raises(SelectorError, match=f"^target 'role:q_prj' is no role; did you mean 'role:q_proj'\\? {known}$"):
        check_targets(["role:q_prj"])
