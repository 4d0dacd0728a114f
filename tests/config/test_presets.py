"""Presets: the names, what each means, and the round trips that every configuration has."""

import re
from pathlib import Path

import pytest

from graphquant.config import PRESETS, KVCacheScheme, QuantizationArgs, QuantizationConfig, preset
from graphquant.errors import SelectorError

KV_SUMMARIES = {
    "int8-kv-tensor": "int8 sym tensor",
    "int8-kv-channel": "int8 sym channel",
    "int8-kv-attn-head": "int8 sym attn_head",
    "int8-kv-attn-head-channel": "int8 sym attn_head_channel",
    "int8-kv-token": "int8 sym token dynamic",
    "int4-kv-channel": "int4 sym channel",
    "int4-kv-attn-head-channel": "int4 asym attn_head_channel",
    "int4-kv-group32": "int4 asym group(32)",
    "fp8-kv-tensor": "fp8_e4m3 tensor",
    "fp8-kv-attn-head": "fp8_e4m3 attn_head",
}
# name → for each group, its targets and what is quantized how.
GROUPS = {
    "int4-kproj-v": [
        (("role:k_proj",), {"output_activations": "int4 asym channel"}),
        (("role:attention",), {"value_states": "int4 asym attn_head_channel"}),
    ],
    "int8-qkv-attn-head": [(("role:attention",), {"input_activations": "int8 sym attn_head"})],
    "int8-qkv-proj-channel": [
        (("role:q_proj", "role:k_proj", "role:v_proj"), {"output_activations": "int8 sym channel"})
    ],
    "fp8-qkv-attn-head": [(("role:attention",), {"input_activations": "fp8_e4m3 attn_head"})],
}


def test_names() -> None:
    assert set(PRESETS) == {*KV_SUMMARIES, *GROUPS}


@pytest.mark.parametrize("name", KV_SUMMARIES)
def test_kv_presets_say_the_same_of_key_and_value(name: str) -> None:
    config = preset(name)
    scheme = config.kv_cache_scheme
    assert scheme is not None
    assert scheme.key is not None
    assert scheme.key.summary() == KV_SUMMARIES[name]
    assert config == QuantizationConfig(kv_cache_scheme=KVCacheScheme(key=scheme.key, value=scheme.key))


@pytest.mark.parametrize("name", GROUPS)
def test_group_presets(name: str) -> None:
    config = preset(name)
    found = [
        (
            group.targets,
            {key: args.summary() for key, args in vars(group).items() if isinstance(args, QuantizationArgs)},
        )
        for group in config.config_groups.values()
    ]
    assert found == GROUPS[name]
    assert config.kv_cache_scheme is None


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_reads_back_equal(name: str, tmp_path: Path) -> None:
    config = preset(name)
    assert QuantizationConfig.from_dict(config.to_dict()) == config
    config.to_recipe(tmp_path / "recipe.yaml")
    assert QuantizationConfig.from_recipe(tmp_path / "recipe.yaml") == config


@pytest.mark.parametrize("name", PRESETS)
def test_the_description_names_the_number_format(name: str) -> None:
    assert name.split("-")[0] in PRESETS[name].description
    assert preset(name) == PRESETS[name].build()


def test_an_unknown_name_offers_the_closest() -> None:
    message = f"unknown preset 'int8-kv-tensr'; did you mean 'int8-kv-tensor'? (known: {', '.join(PRESETS)})"
    with pytest.raises(SelectorError, match=f"^{re.escape(message)}$"):
        preset("int8-kv-tensr")
