"""QuantizationConfig: round trips, compressed-tensors' own JSON, and each refusal in its words."""

import copy
import json
import pickle
import re
from typing import Any

import pytest
from hypothesis import given

from graphquant.config import KVCacheScheme, QuantizationArgs, QuantizationConfig, QuantizationScheme
from graphquant.errors import ConfigError, StrategyError
from tests.config.generated import configs, law

FP8 = QuantizationArgs(type="float")
FP8_KV = QuantizationConfig(kv_cache_scheme=KVCacheScheme(key=FP8, value=FP8), ignore=("lm_head",))
# As a compressed-tensors checkpoint has it in config.json.
FP8_KV_JSON: dict[str, Any] = {
    "config_groups": {},
    "format": "dense",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "kv_cache_scheme": {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "tensor",
        "symmetric": True,
        "type": "float",
    },
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.12.2",
}


@law
@given(configs())
def test_json_form_reads_back_equal(config: QuantizationConfig) -> None:
    data = config.to_dict()
    again = QuantizationConfig.from_dict(json.loads(json.dumps(data)))
    assert again == config
    assert hash(again) == hash(config)
    assert again.to_dict() == data
    assert list(again.config_groups) == list(config.config_groups)
    assert QuantizationConfig.from_dict({"quantization_config": data}) == config


@law
@given(configs())
def test_a_config_is_a_value(config: QuantizationConfig) -> None:
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_json_form() -> None:
    assert FP8_KV.to_dict() == {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "ignore": ["lm_head"],
        "kv_cache_scheme": FP8.to_dict(),
    }


def test_reads_the_json_of_a_checkpoint() -> None:
    assert QuantizationConfig.from_dict(FP8_KV_JSON) == FP8_KV
    model = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "quantization_config": FP8_KV_JSON}
    assert QuantizationConfig.from_dict(model) == FP8_KV


def test_ignore_may_be_a_single_string_or_null() -> None:
    assert QuantizationConfig.from_dict({"ignore": "lm_head", "kv_cache_scheme": {"type": "float"}}) == FP8_KV
    assert QuantizationConfig.from_dict({"ignore": None, "kv_cache_scheme": {}}).ignore == ()


def test_reading_does_not_change_the_data() -> None:
    data = copy.deepcopy(FP8_KV_JSON)
    QuantizationConfig.from_dict(data)
    assert data == FP8_KV_JSON


KV: dict[str, Any] = {"kv_cache_scheme": {}}
REFUSED: list[tuple[Any, str]] = [
    ({}, "nothing to quantize: give config_groups or kv_cache_scheme"),
    ({"config_groups": None}, "nothing to quantize: give config_groups or kv_cache_scheme"),
    (
        {"config_group": {}},
        "unknown key 'config_group'; did you mean 'config_groups'? (known: config_groups, ignore, kv_cache_scheme)",
    ),
    (
        {**KV, "kv_cache_sheme": {}},
        "unknown key 'kv_cache_sheme'; did you mean 'kv_cache_scheme'? (known: config_groups, ignore, kv_cache_scheme)",
    ),
    (
        {**KV, "quant_methd": 1},
        "unknown key 'quant_methd'; did you mean 'quant_method'? (known: config_groups, ignore, kv_cache_scheme)",
    ),
    ({**KV, "architectures": []}, "unknown key 'architectures' (known: config_groups, ignore, kv_cache_scheme)"),
    (
        {**KV, "quantization_config": {}},
        "quantization_config and kv_cache_scheme are both given; keep one",
    ),
    ({**KV, "quant_method": "gptq"}, "quant_method must be 'compressed-tensors', not 'gptq'"),
    (
        {**KV, "sparsity_config": {"format": "dense"}},
        "sparsity_config is not supported: leave it out, or set it null",
    ),
    (
        {**KV, "transform_config": {"config_groups": {}}},
        "transform_config is not supported: leave it out, or set it null",
    ),
    ({**KV, "ignore": 3}, "ignore must be a string or a list of strings, not 3"),
    (
        {**KV, "ignore": ["re:["]},
        "ignore: target 're:[' is no regular expression: unterminated character set at position 0",
    ),
    ({"kv_cache_scheme": {"num_bits": "8"}}, "kv_cache_scheme: num_bits must be an integer, not '8'"),
    ({"kv_cache_scheme": {"key": {"type": 1}}}, "kv_cache_scheme.key: type must be one of int, uint, float, not 1"),
    ({"config_groups": []}, "config_groups: expected a mapping (name → scheme), found list []"),
    (
        {"config_groups": {"FP8": ["Linear"]}},
        "config_groups.FP8: expected a mapping (a quantization scheme), found list ['Linear']",
    ),
    ({"config_groups": {0: {}}}, "config_groups: expected string keys (name → scheme), found int 0; quote it"),
    (
        {"quantization_config": {"config_groups": {"g": {"targets": ["x"], "key_states": {"symmetric": 0}}}}},
        "quantization_config.config_groups.g.key_states: symmetric must be true or false, not 0",
    ),
    (
        {"quantization_config": {"quant_method": "awq"}},
        "quantization_config: quant_method must be 'compressed-tensors', not 'awq'",
    ),
    (
        {"quantization_config": None},
        "quantization_config: expected a mapping (a quantization config), found NoneType None",
    ),
    ("int8", "expected a mapping (a quantization config), found str 'int8'"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_refuses_in_one_clear_line(data: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        QuantizationConfig.from_dict(data)


def test_where_does_not_change_the_kind_of_error() -> None:
    with pytest.raises(StrategyError, match=r"^kv_cache_scheme: strategy 'block' is not built yet"):
        QuantizationConfig.from_dict({"kv_cache_scheme": {"strategy": "block"}})


def test_the_constructor_refuses_plain_data() -> None:
    with pytest.raises(ConfigError, match=r"^config_groups.g must be a QuantizationScheme, not dict$"):
        QuantizationConfig(config_groups={"g": {}})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"^kv_cache_scheme must be a KVCacheScheme, not QuantizationArgs$"):
        QuantizationConfig(kv_cache_scheme=FP8)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"^config_groups: expected a mapping \(name → QuantizationScheme\), found list"
    ):
        QuantizationConfig(config_groups=[])  # type: ignore[arg-type]


def test_groups_cannot_be_changed_from_outside() -> None:
    scheme = QuantizationScheme(targets=("x",), key_states=FP8)
    groups = {"g": scheme}
    config = QuantizationConfig(config_groups=groups)
    groups.clear()
    assert config.config_groups == {"g": scheme}
    with pytest.raises(TypeError, match="does not support item assignment"):
        config.config_groups["h"] = scheme  # type: ignore[index]
