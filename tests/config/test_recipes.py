"""Recipes: every form that is read, the round trip, atomic writing, and each refusal with its path in the file."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import given

from graphquant.config import KVCacheScheme, QuantizationArgs, QuantizationConfig, QuantizationScheme
from graphquant.errors import ConfigError, OutputError
from tests.config.generated import configs, law

USERS_RECIPE = """
quant_stage:
  quant_modifiers:
    QuantizationModifier:
      config_groups:
        attention:
          targets: ["re:.*self_attn$"]
          input_activations: {num_bits: 8, type: int, symmetric: true, strategy: attn_head}
        qkv:
          targets: ["re:.*(q|k|v)_proj$"]
          output_activations: {num_bits: 8, type: int, symmetric: true, strategy: channel}
"""
AT = "quant_stage.quant_modifiers.QuantizationModifier"
INT8 = QuantizationArgs()
KV = QuantizationConfig(kv_cache_scheme=KVCacheScheme(key=INT8, value=INT8), ignore=("lm_head",))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tmp_path / "recipe.yaml"


def read(path: Path, text: str) -> QuantizationConfig:
    path.write_text(text, encoding="utf-8")
    return QuantizationConfig.from_recipe(path)


@law
@given(config=configs())
def test_recipe_reads_back_equal(recipe: Path, config: QuantizationConfig) -> None:
    config.to_recipe(recipe)
    again = QuantizationConfig.from_recipe(str(recipe))
    assert again == config
    assert list(again.config_groups) == list(config.config_groups)


def test_the_recipe_of_a_user(recipe: Path) -> None:
    assert read(recipe, USERS_RECIPE) == QuantizationConfig(
        config_groups={
            "attention": QuantizationScheme(
                targets=("re:.*self_attn$",), input_activations=QuantizationArgs(strategy="attn_head")
            ),
            "qkv": QuantizationScheme(
                targets=("re:.*(q|k|v)_proj$",), output_activations=QuantizationArgs(strategy="channel")
            ),
        }
    )


@pytest.mark.parametrize(
    "text",
    [
        "default_stage: {default_modifiers: {QuantizationModifier: {kv_cache_scheme: {}, ignore: lm_head}}}",
        "stage: {modifiers: {QuantizationModifier: {kv_cache_scheme: {}, ignore: lm_head}}}",
        "a_stage: {b_modifiers: [{QuantizationModifier: {kv_cache_scheme: {}, ignore: [lm_head]}}]}",
        "empty_stage: {}\nq_stage: {q_modifiers: {QuantizationModifier: {kv_cache_scheme: {}, ignore: lm_head}}}",
        "quant_modifiers: {QuantizationModifier: {kv_cache_scheme: {}, ignore: lm_head}}",
        "quant_modifiers:\n- QuantizationModifier:\n    kv_cache_scheme: {}\n    ignore: lm_head\n",
        "QuantizationModifier: {kv_cache_scheme: {}, ignore: lm_head}",
        "{kv_cache_scheme: {}, ignore: lm_head}",
        "{kv_cache_scheme: {}, ignore: lm_head, targets: [Linear], scheme: null, config_groups: null}",
    ],
)
def test_forms(recipe: Path, text: str) -> None:
    assert read(recipe, text) == KV


@pytest.mark.parametrize("prefix", ["QuantizationModifier: ", ""])
def test_targets_and_scheme_make_one_group(recipe: Path, prefix: str) -> None:
    text = prefix + "{targets: 're:.*k_proj', scheme: {output_activations: {}, format: dense}}"
    scheme = QuantizationScheme(targets=("re:.*k_proj",), output_activations=INT8)
    assert read(recipe, text) == QuantizationConfig(config_groups={"group_0": scheme})


PRESET = (
    "is a preset of llm-compressor that quantizes weights, which are not built; write config_groups with "
    "input_activations or output_activations instead"
)
ARG_KEYS = "num_bits, type, symmetric, strategy, group_size, dynamic, observer, observer_kwargs, float_format"
TOP_KEYS = "quant_stage, quant_modifiers, QuantizationModifier, config_groups, ignore, kv_cache_scheme"
REFUSED = [
    (
        USERS_RECIPE.replace("{num_bits: 8, type: int, symmetric: true, strategy: channel}", "{num_bit: 8}"),
        f"{AT}.config_groups.qkv.output_activations: unknown key 'num_bit'; did you mean 'num_bits'? "
        f"(known: {ARG_KEYS})",
    ),
    (
        USERS_RECIPE.replace("config_groups", "config_group"),
        f"{AT}: unknown key 'config_group'; did you mean 'config_groups'? "
        "(known: config_groups, ignore, kv_cache_scheme)",
    ),
    (
        USERS_RECIPE.replace("quant_modifiers", "quant_modifier"),
        "quant_stage: unknown key 'quant_modifier'; did you mean 'quant_modifiers'? (known: quant_modifiers)",
    ),
    (
        USERS_RECIPE.replace("quant_stage", "quant_stages"),
        f"unknown key 'quant_stages'; did you mean 'quant_stage'? (known: {TOP_KEYS})",
    ),
    (
        USERS_RECIPE.replace("QuantizationModifier", "QuantizatonModifier"),
        "quant_stage.quant_modifiers: QuantizatonModifier is not supported; did you mean 'QuantizationModifier'? "
        "(known: QuantizationModifier); remove it from the recipe",
    ),
    (
        "quant_modifiers: [{SmoothQuantModifier: {}}]",
        "quant_modifiers[0]: SmoothQuantModifier is not supported (known: QuantizationModifier); "
        "remove it from the recipe",
    ),
    (
        "GPTQModifier: {scheme: W4A16}",
        "GPTQModifier is not supported (known: QuantizationModifier); remove it from the recipe",
    ),
    ("QuantizationModifier: {scheme: FP8, targets: Linear}", f"QuantizationModifier: scheme 'FP8' {PRESET}"),
    ("{scheme: W8A8, targets: Linear}", f"scheme 'W8A8' {PRESET}"),
    (
        "QuantizationModifier: {scheme: {W8A8: [Linear]}}",
        f"QuantizationModifier: scheme {{'W8A8': ['Linear']}} {PRESET}",
    ),
    (
        "QuantizationModifier: {scheme: {key_states: {}}, targets: x, config_groups: {}}",
        "QuantizationModifier: scheme and config_groups are both given; keep config_groups",
    ),
    (
        "QuantizationModifier: {scheme: {key_states: {}}}",
        "QuantizationModifier: scheme needs targets, beside it and not inside it",
    ),
    (
        "QuantizationModifier: {scheme: {key_states: {}, targets: [x]}, targets: [x]}",
        "QuantizationModifier: scheme needs targets, beside it and not inside it",
    ),
    (
        "QuantizationModifier: {targets: x, scheme: {weights: {num_bits: 8}}}",
        "QuantizationModifier.scheme: weights is refused until it is built: only activations and states are quantized",
    ),
    (
        "QuantizationModifier: {targets: x, scheme: {key_states: {num_bits: 1.5}}}",
        "QuantizationModifier.scheme.key_states: num_bits must be an integer, not 1.5",
    ),
    (
        "QuantizationModifier: {targets: [x], kv_cache_scheme: {}}",
        "QuantizationModifier: targets ['x'] has no scheme beside it; move it into one of the config_groups",
    ),
    (
        "a_stage: {m_modifiers: {QuantizationModifier: {}}}\nb_stage: {m_modifiers: {QuantizationModifier: {}}}",
        "2 QuantizationModifiers, at a_stage.m_modifiers.QuantizationModifier and "
        "b_stage.m_modifiers.QuantizationModifier; keep one",
    ),
    (
        "quant_stage: {quant_modifiers: {}}",
        "there is no QuantizationModifier; put config_groups or kv_cache_scheme into one",
    ),
    ("{}", "there is no QuantizationModifier; put config_groups or kv_cache_scheme into one"),
    ("QuantizationModifier: {}", "QuantizationModifier: nothing to quantize: give config_groups or kv_cache_scheme"),
    ("QuantizationModifier:", "QuantizationModifier: expected a mapping (a QuantizationModifier), found NoneType None"),
    ("{config_groups: {}, version: 1}", "unknown key 'version' (known: config_groups, ignore, kv_cache_scheme)"),
    ("quant_stage: 3", "quant_stage: expected a mapping (a stage), found int 3"),
    ("quant_modifiers: &a [*a]", "quant_modifiers[0]: expected a mapping (modifiers by name), found list [[...]]"),
    ("quant_modifiers: 3", "quant_modifiers: expected a mapping (modifiers by name), found int 3"),
    ("- a\n- b", "expected a mapping (a recipe), found list ['a', 'b']"),
    ("", "the file is empty; a recipe has a stage, a modifier or config_groups"),
    ("# a comment\n", "the file is empty; a recipe has a stage, a modifier or config_groups"),
    ("a: 1\nb: [1, 2\n", "invalid YAML in line 3: expected ',' or ']', but got '<stream end>'"),
    ("config_groups:\n  a: {}\n  a: {}\n", "invalid YAML in line 3: the key 'a' is repeated"),
    (
        "a: !QuantizationModifier {}",
        "invalid YAML in line 1: could not determine a constructor for the tag '!QuantizationModifier'",
    ),
    ("a: 2024-13-45", "invalid YAML: month must be in 1..12"),
    (
        "a: \x01",
        "invalid YAML: unacceptable character #x0001: special characters are not allowed "
        'in "<unicode string>", position 3',
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_refuses_with_the_path_in_the_file(recipe: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{recipe}: {message}')}$"):
        read(recipe, text)


def test_files_that_cannot_be_read(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"recipe\.yaml: no such file$"):
        QuantizationConfig.from_recipe(recipe)
    with pytest.raises(ConfigError, match=f"^{recipe.parent}: cannot be read as a recipe: Is a directory$"):
        QuantizationConfig.from_recipe(recipe.parent)
    recipe.write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match=r"recipe\.yaml: is not UTF-8 text: invalid start byte at byte 3$"):
        QuantizationConfig.from_recipe(recipe)


def test_writes_the_staged_form_and_leaves_nothing_beside_it(recipe: Path) -> None:
    recipe.write_text("old")
    KV.to_recipe(recipe)
    assert recipe.read_text().startswith("quant_stage:\n  quant_modifiers:\n    QuantizationModifier:\n")
    assert list(recipe.parent.iterdir()) == [recipe]
    plain = recipe.with_name("plain")
    plain.write_text("")
    assert recipe.stat().st_mode == plain.stat().st_mode


def test_a_failed_write_keeps_the_old_file(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe.write_text("old")

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match=f"^cannot write {recipe}: No space left on device$"):
        KV.to_recipe(recipe)
    assert recipe.read_text() == "old"
    assert list(recipe.parent.iterdir()) == [recipe]


def test_places_that_cannot_be_written(recipe: Path) -> None:
    nowhere = recipe.parent / "missing" / "recipe.yaml"
    with pytest.raises(
        OutputError, match=f"^cannot write {nowhere}: there is no folder {nowhere.parent}; create it first$"
    ):
        KV.to_recipe(nowhere)
    KV.to_recipe(recipe)
    inside_a_file = recipe / "recipe.yaml"
    with pytest.raises(OutputError, match=f"^cannot write {inside_a_file}: Not a directory$"):
        KV.to_recipe(inside_a_file)
    recipe.unlink()
    too_long = recipe.with_name("a" * 256)
    with pytest.raises(OutputError, match=f"^cannot write {too_long}: File name too long$"):
        KV.to_recipe(too_long)
    recipe.mkdir()
    with pytest.raises(OutputError, match=f"^cannot write {recipe}: Is a directory$"):
        KV.to_recipe(recipe)
    assert list(recipe.parent.iterdir()) == [recipe]
