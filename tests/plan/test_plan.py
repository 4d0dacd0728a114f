"""The plan as a value: one entry a tensor, its scale's shape, its table and its JSON."""

import json

import pytest

from graphquant.config import QuantizationArgs, QuantizationConfig
from graphquant.errors import SelectorError, StrategyError
from graphquant.graph import AttentionSites, find_attention
from graphquant.observers import MovingAverageObserver
from graphquant.plan import make_plan
from tests.graph.modules import export, sdpa_causal
from tests.graph.sharing import OneTensor, SharedKeyValue
from tests.plan.configs import CHANNELS, FP8, HEADS, INT4, INT8, TOKENS, config, scheme

ISSUE = config(
    scheme("re:.*self_attn$", input_activations=HEADS),
    scheme("re:.*(q|k|v)_proj$", output_activations=CHANNELS),
)


def test_the_recipe_of_the_issue(llama_sites: AttentionSites) -> None:
    plan = make_plan(llama_sites, ISSUE)
    assert len(plan) == 18
    for layer in range(3):
        shapes = {planned.site.role: planned.scale_shape for planned in plan if planned.site.layer == layer}
        assert shapes == {
            "q_proj.output": "[32]",
            "k_proj.output": "[16]",
            "v_proj.output": "[16]",
            "query_states": "[4, 1, 1]",
            "key_states": "[2, 1, 1]",
            "value_states": "[2, 1, 1]",
        }


@pytest.mark.parametrize(
    ("args", "output", "states"),
    [
        (INT8, "[1]", "[1]"),
        (CHANNELS, "[16]", "[8]"),
        (HEADS, "[2]", "[2, 1, 1]"),
        (QuantizationArgs(strategy="attn_head_channel"), "[16]", "[2, 1, 8]"),
        (QuantizationArgs(strategy="group", group_size=4), "[4]", "[2, 1, 2]"),
        (TOKENS, "[B, S, 1]", "[B, 2, S, 1]"),
    ],
)
def test_scale_shapes(llama_sites: AttentionSites, args: QuantizationArgs, output: str, states: str) -> None:
    """As the design's table has them, for 2 KV heads of 8 channels."""
    plan = make_plan(llama_sites, config(scheme("role:k_proj", output_activations=args), key=args))
    assert [planned.scale_shape for planned in plan] == [output, states] * 3


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            config(key=QuantizationArgs(strategy="group", group_size=3)),
            r"^model\.layers\.0\.self_attn\.key_states \(node add_\d+, modeling_llama\.py:\d+\): group_size must "
            r"divide the last dim 8 of \[B, 2, S, 8\], and 3 does not; use one of 2, 4, 8$",
        ),
        (
            config(scheme("Linear", input_activations=HEADS)),
            r"^model\.layers\.0\.self_attn\.q_proj\.input \(node mul_\d+, modeling_llama\.py:\d+\): strategy "
            r"'attn_head' needs attention heads, and the input of a projection \[B, S, 32\] has none; use tensor, ",
        ),
    ],
)
def test_a_strategy_that_cannot_be(llama_sites: AttentionSites, wanted: QuantizationConfig, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        make_plan(llama_sites, wanted)


def test_inputs_that_are_one_tensor(llama_sites: AttentionSites) -> None:
    plan = make_plan(llama_sites, config(scheme("Linear", input_activations=INT8)))
    first, *_ = plan
    assert len(plan) == 3
    assert first.key == "model.layers.0.self_attn.q_proj.input"
    assert first.keys == tuple(f"model.layers.0.self_attn.{letter}_proj.input" for letter in "qkv")
    assert plan.coverage() == {"tensors": 3, "sites": 9, "found": 27, "ignored": 0, "near_misses": 0}


@pytest.mark.parametrize(
    ("wanted", "roles"),
    [
        (config(*(scheme(f"role:{name}", input_activations=INT8) for name in ("q_proj", "k_proj"))), "qk"),
        (config(scheme("Linear", input_activations=INT8), ignore=("role:v_proj",)), "qk"),
        (config(scheme("role:v_proj", input_activations=INT8)), "v"),
    ],
    ids=["not selected", "ignored", "one"],
)
def test_the_input_that_projections_share_is_quantized_for_those_that_are_selected(
    llama_sites: AttentionSites, wanted: QuantizationConfig, roles: str
) -> None:
    for planned in make_plan(llama_sites, wanted):
        assert planned.keys == tuple(f"{planned.site.attention}.{letter}_proj.input" for letter in roles)


def test_one_tensor_takes_one_set_of_arguments(llama_sites: AttentionSites) -> None:
    wanted = config(
        scheme("role:q_proj", input_activations=INT4),
        *(scheme(f"role:{name}", input_activations=INT8) for name in ("k_proj", "v_proj")),
    )
    message = r"q_proj\.input and .*k_proj\.input are one tensor .* and are given int4 sym tensor and int8 sym"
    with pytest.raises(SelectorError, match=message):
        make_plan(llama_sites, wanted)


def test_keys_that_are_the_values() -> None:
    sites = find_attention(export(OneTensor(sdpa_causal)))
    (planned,) = make_plan(sites, config(key=INT8, value=INT8))
    assert planned.keys == ("attention_0.key_states", "attention_0.value_states")
    with pytest.raises(SelectorError, match=r"key_states and .*value_states are one tensor"):
        make_plan(sites, config(key=INT8))
    with pytest.raises(SelectorError, match=r"are given int8 sym tensor and int4 sym tensor: give them the same"):
        make_plan(sites, config(key=INT8, value=INT4))


def test_keys_and_values_of_two_layers() -> None:
    sites = find_attention(export(SharedKeyValue()))
    plan = make_plan(sites, config(key=INT8, value=INT8))
    first, second = (layer.path for layer in sites.layers)
    assert [planned.keys for planned in plan] == [
        (f"{first}.{role}", f"{second}.{role}") for role in ("key_states", "value_states")
    ]


@pytest.mark.parametrize(
    ("kv", "expected"),
    [
        ({"key": FP8}, [("key_states", FP8)]),
        ({"value": FP8}, [("value_states", FP8)]),
        ({"key": CHANNELS, "value": TOKENS}, [("key_states", CHANNELS), ("value_states", TOKENS)]),
    ],
)
def test_the_kv_cache_alone(
    llama_sites: AttentionSites, kv: dict[str, QuantizationArgs], expected: list[tuple[str, QuantizationArgs]]
) -> None:
    plan = make_plan(llama_sites, config(**kv))
    assert [(planned.site.role, planned.args) for planned in plan] == expected * 3


@pytest.mark.parametrize(
    "wanted",
    [
        config(scheme("role:attention", input_activations=HEADS)),
        config(scheme("role:q_proj", "role:k_proj", "role:v_proj", output_activations=CHANNELS)),
        config(key=INT8, value=INT4),
    ],
)
def test_renamed_modules_have_the_same_plan(
    plain_sites: AttentionSites, renamed_sites: AttentionSites, wanted: QuantizationConfig
) -> None:
    plan = make_plan(plain_sites, wanted)
    assert make_plan(renamed_sites, wanted).rows() == plan.rows()
    assert len(plan) >= 4


def test_json(llama_sites: AttentionSites) -> None:
    plan = make_plan(llama_sites, ISSUE)
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["coverage"] == {"tensors": 18, "sites": 18, "found": 27, "ignored": 0, "near_misses": 0}
    assert len(data["sites"]) == 18
    last = data["sites"][-1]
    assert (last["layer"], last["site"]) == (2, "model.layers.2.self_attn.value_states")
    assert QuantizationArgs.from_dict(last["args"]) == HEADS
    assert data["sites"] == [row | {"args": p.args.to_dict()} for row, p in zip(plan.rows(), plan, strict=True)]


def test_equal_configs_give_equal_plans(llama_sites: AttentionSites) -> None:
    again = QuantizationConfig.from_dict(ISSUE.to_dict())
    assert make_plan(llama_sites, again) == make_plan(llama_sites, ISSUE)
    assert make_plan(llama_sites, config(key=INT8)) != make_plan(llama_sites, config(key=INT4))


def test_the_observer_is_the_configured_one(llama_sites: AttentionSites) -> None:
    args = QuantizationArgs(observer="moving_average", observer_kwargs={"averaging_constant": 0.5})
    first, *_ = make_plan(llama_sites, config(key=args))
    assert isinstance(first.observer(), MovingAverageObserver)


TABLE = """\
  layer  site                    node         dims          quantized as            observer    scale
-------  ----------------------  -----------  ------------  ----------------------  ----------  ---------
      0  layers.0.q_proj.input   x            [B, S, 16]    int8 sym token dynamic              [B, S, 1]
      0  layers.0.k_proj.output  linear_1     [B, S, 16]    int8 sym channel        minmax      [16]
      0  layers.0.key_states     transpose_1  [B, 2, S, 8]  int8 sym attn_head      minmax      [2, 1, 1]
      0  layers.0.value_states   transpose_2  [B, 2, S, 8]  int4 asym group(4)      minmax      [2, 1, 2]
"""


def test_table(plain_sites: AttentionSites) -> None:
    mixed = config(
        scheme("role:q_proj", "role:k_proj", "role:v_proj", input_activations=TOKENS),
        scheme("role:k_proj", output_activations=CHANNELS),
        key=HEADS,
        value=QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=4),
        ignore=("layers.1",),
    )
    assert "\n".join(line.rstrip() for line in str(make_plan(plain_sites, mixed)).splitlines()) + "\n" == TABLE
