"""What a target, the KV cache's scheme and an ignore entry select, who wins, and what is said when it is nothing."""

import dataclasses

import pytest

from graphquant.config import QuantizationArgs, QuantizationConfig, QuantizationScheme
from graphquant.errors import SelectorError
from graphquant.graph import AttentionSites, find_attention
from graphquant.plan import QuantizationPlan, make_plan
from tests.graph.modules import Attention, Stack, export, sdpa_causal
from tests.graph.sharing import Twice
from tests.graph.test_missing_sites import KeysTransposed
from tests.plan.configs import CHANNELS, FP8, HEADS, INT4, INT8, TOKENS, config, scheme

SELF_ATTN = "model.layers.{}.self_attn"
OUTPUTS = ["q_proj.output", "k_proj.output", "v_proj.output"]
STATES = ["query_states", "key_states", "value_states"]
THERE_ARE = (
    r"there are model\.layers\.\*\.self_attn\.q_proj \(Linear\), model\.layers\.\*\.self_attn\.k_proj \(Linear\), "
    r"model\.layers\.\*\.self_attn\.v_proj \(Linear\), model\.layers\.\*\.self_attn \(LlamaAttention\)"
)


def selected(plan: QuantizationPlan) -> list[str]:
    return [key for planned in plan for key in planned.keys]


def in_layers(layers: list[int], roles: list[str]) -> list[str]:
    return [f"{SELF_ATTN.format(layer)}.{role}" for layer in layers for role in roles]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (scheme("re:.*self_attn$", input_activations=INT8), in_layers([0, 1, 2], STATES)),
        (scheme("LlamaAttention", input_activations=INT8), in_layers([0, 1, 2], STATES)),
        (scheme("role:attention", input_activations=INT8), in_layers([0, 1, 2], STATES)),
        (scheme(SELF_ATTN.format(1), input_activations=INT8), in_layers([1], STATES)),
        (scheme("LlamaAttention", key_states=INT8, value_states=INT4), in_layers([0, 1, 2], STATES[1:])),
        (scheme("Linear", output_activations=INT8), in_layers([0, 1, 2], OUTPUTS)),
        (scheme("re:.*(q|k|v)_proj$", output_activations=INT8), in_layers([0, 1, 2], OUTPUTS)),
        (scheme("role:k_proj", output_activations=INT8), in_layers([0, 1, 2], OUTPUTS[1:2])),
        (scheme(SELF_ATTN.format(2) + ".v_proj", output_activations=INT8), in_layers([2], OUTPUTS[2:])),
        (scheme("re:.*layers.[02].self_attn$", query_states=INT8), in_layers([0, 2], STATES[:1])),
    ],
)
def test_a_target_selects(llama_sites: AttentionSites, group: QuantizationScheme, expected: list[str]) -> None:
    assert selected(make_plan(llama_sites, config(group))) == expected


@pytest.mark.parametrize(
    ("targets", "winner"),
    [
        (("LlamaAttention", "re:.*self_attn$"), "re:.*self_attn$"),
        (("re:.*self_attn$", "role:attention"), "role:attention"),
        (("role:attention", SELF_ATTN.format(1)), SELF_ATTN.format(1)),
        (("LlamaAttention", SELF_ATTN.format(1)), SELF_ATTN.format(1)),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_priority(llama_sites: AttentionSites, targets: tuple[str, str], winner: str, turned: bool) -> None:
    """Exact path, then role, then regular expression, then class name, whatever the order of the groups."""
    groups = [scheme(target, input_activations=INT4 if target == winner else INT8) for target in targets]
    plan = make_plan(llama_sites, config(*(reversed(groups) if turned else groups)))
    at = {planned.site.layer: planned.args for planned in plan}
    assert at[1] == INT4
    assert at[0] == (INT8 if winner.startswith("model") else INT4)


def test_the_best_target_of_one_group_counts(llama_sites: AttentionSites) -> None:
    both = scheme("LlamaAttention", SELF_ATTN.format(0), input_activations=INT4)
    plan = make_plan(llama_sites, config(both, scheme("re:.*self_attn$", input_activations=INT8)))
    assert [planned.args for planned in plan] == [INT4] * 3 + [INT8] * 6


@pytest.mark.parametrize(
    ("target", "keys"),
    [("LlamaAttention", FP8), ("re:.*self_attn$", FP8), (SELF_ATTN.format(0), INT4)],
)
def test_the_kv_cache_scheme_counts_as_a_role(llama_sites: AttentionSites, target: str, keys: QuantizationArgs) -> None:
    plan = make_plan(llama_sites, config(scheme(target, input_activations=INT4), key=FP8))
    at = {planned.key: planned.args for planned in plan}
    assert at["model.layers.0.self_attn.key_states"] == keys
    assert at["model.layers.0.self_attn.value_states"] == INT4


@pytest.mark.parametrize(
    ("wanted", "sides"),
    [
        (
            config(scheme("re:.*self_attn$", key_states=INT8), scheme("re:model.*", key_states=HEADS)),
            "group 'a'.*group 'b'",
        ),
        (config(scheme("role:attention", key_states=INT8), key=HEADS), "group 'a'.*kv_cache_scheme"),
    ],
)
def test_equal_priority(llama_sites: AttentionSites, wanted: QuantizationConfig, sides: str) -> None:
    first, second = sides.split(".*")
    message = (
        rf"^model\.layers\.0\.self_attn\.key_states is given int8 sym tensor by {first} and int8 sym attn_head by "
        rf"{second}, with equal priority: narrow the targets of one of them$"
    )
    with pytest.raises(SelectorError, match=message):
        make_plan(llama_sites, wanted)


def test_equal_priority_and_equal_arguments_agree(llama_sites: AttentionSites) -> None:
    plan = make_plan(llama_sites, config(scheme("role:attention", key_states=INT8), key=INT8, value=INT8))
    assert len(plan) == 6


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (scheme("re:.*attention$", input_activations=INT8), r"target 're:.*attention\$' selects nothing"),
        (scheme("self_attn", input_activations=INT8), r"target 'self_attn' selects nothing"),
        (
            scheme("LlamaAttention", "re:.*mlp$", input_activations=INT8),
            r"matches 3 modules \(model\.layers\.\*\.mlp\), none",
        ),
        (scheme("LlamaMLP", input_activations=INT8), r"none of them attention or a q/k/v linear"),
        (scheme("LlamaAttention", output_activations=INT8), r"selects modules that this group gives nothing to"),
    ],
)
def test_a_target_that_selects_nothing(llama_sites: AttentionSites, group: QuantizationScheme, reason: str) -> None:
    with pytest.raises(SelectorError, match=rf"^group 'a': .*{reason}.*; {THERE_ARE}$"):
        make_plan(llama_sites, config(group))


def test_a_field_that_applies_to_nothing(llama_sites: AttentionSites) -> None:
    group = scheme("LlamaAttention", input_activations=INT8, output_activations=CHANNELS)
    message = (
        r"^group 'a': output_activations applies to nothing that its targets \['LlamaAttention'\] select; attention"
    )
    with pytest.raises(SelectorError, match=message):
        make_plan(llama_sites, config(group))


@pytest.mark.parametrize(
    ("ignore", "layers"),
    [
        (("model.layers.0", "model.layers.2"), [1]),
        (("model.layers.0.self_attn", "model.layers.2.self_attn"), [1]),
        (("re:.*layers.0.self_attn", r"re:model\.layers\.2\."), [1]),
        (("re:.*layers.[02]$",), [1]),
        (("lm_head", "LlamaMLP", "re:.*mlp.*"), [0, 1, 2]),
    ],
)
def test_ignored_layers(llama_sites: AttentionSites, ignore: tuple[str, ...], layers: list[int]) -> None:
    """The first and the last layer, by path, by a path above, by regular expression; and modules of no site."""
    groups = (
        scheme("re:.*self_attn$", input_activations=INT8),
        scheme("re:.*(q|k|v)_proj$", output_activations=INT8, input_activations=TOKENS),
    )
    plan = make_plan(llama_sites, config(*groups, ignore=ignore))
    roles = ["q_proj.input", "k_proj.input", "v_proj.input", *OUTPUTS, *STATES]
    assert selected(plan) == in_layers(layers, roles)
    assert plan.ignored == 27 - 9 * len(layers)


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (("Linear",), STATES),
        (("role:attention",), OUTPUTS),
        (("role:k_proj", "role:v_proj"), [*OUTPUTS[:1], *STATES]),
        (("re:.*value_states",), [*OUTPUTS, *STATES[:2]]),
        (("re:.*self_attn.q_proj", "re:.*query_states"), [*OUTPUTS[1:], *STATES[1:]]),
    ],
)
def test_ignored_parts(llama_sites: AttentionSites, ignore: tuple[str, ...], left: list[str]) -> None:
    groups = (scheme("role:attention", input_activations=INT8), scheme("Linear", output_activations=INT8))
    assert selected(make_plan(llama_sites, config(*groups, ignore=ignore))) == in_layers([0, 1, 2], left)


def test_only_what_was_selected_counts_as_ignored(llama_sites: AttentionSites) -> None:
    assert make_plan(llama_sites, config(key=INT8, ignore=("model.layers.0",))).ignored == 1


def test_an_attention_class_is_ignored_with_its_linears(llama_sites: AttentionSites) -> None:
    with pytest.raises(SelectorError, match=r"^all 9 selected sites are ignored; nothing is left to quantize$"):
        make_plan(llama_sites, config(scheme("Linear", output_activations=INT8), ignore=("LlamaAttention",)))


@pytest.mark.parametrize("entry", ["model.layers.3", "re:.*layer[0-9]", "LlamaAttn", "model.layers.1.self_attn.key"])
def test_an_ignore_entry_that_names_nothing(llama_sites: AttentionSites, entry: str) -> None:
    message = rf"^ignore entry .* names no module of the program; {THERE_ARE}, and \d+ modules in all$"
    with pytest.raises(SelectorError, match=message):
        make_plan(llama_sites, config(key=INT8, ignore=(entry,)))


def test_a_path_is_no_prefix_of_letters(llama_sites: AttentionSites) -> None:
    """To ignore layer 1 is not to ignore layer 10."""

    def tenth(text: str) -> str:
        return text.replace("layers.2", "layers.10")

    layers = tuple(
        dataclasses.replace(
            layer,
            sites=tuple(dataclasses.replace(s, key=tenth(s.key), module=tenth(s.module)) for s in layer.sites),
        )
        for layer in llama_sites.layers
    )
    modules = tuple((tenth(path), cls) for path, cls in llama_sites.modules)
    sites = dataclasses.replace(llama_sites, layers=layers, modules=modules)
    plan = make_plan(sites, config(key=INT8, ignore=("model.layers.1",)))
    assert selected(plan) == in_layers([0, 10], ["key_states"])


def test_a_module_called_twice_is_selected_and_ignored_with_every_call() -> None:
    sites = find_attention(export(Twice(Attention(sdpa_causal))))
    for target in ("layer", "re:layer$", "Attention"):
        plan = make_plan(sites, config(scheme(target, key_states=INT8)))
        assert selected(plan) == ["layer.key_states", "layer#2.key_states"]
    with pytest.raises(SelectorError, match="all 2 selected sites are ignored"):
        make_plan(sites, config(key=INT8, ignore=("layer",)))
    assert selected(make_plan(sites, config(key=INT8, ignore=("layer#2.key_states",)))) == ["layer.key_states"]


def test_the_kv_cache_scheme_wants_the_keys_of_every_layer() -> None:
    """A cache of which one layer is not quantized is no quantized cache: that layer must be left out by name."""
    sites = find_attention(export(Stack(Attention(sdpa_causal), KeysTransposed(sdpa_causal))))
    message = (
        r"^kv_cache_scheme wants the key_states of every layer, and layers\.1 has none that was matched: .*H·D is not "
        r"a merge of heads; .*; leave the layer out with ignore: \[layers\.1\]$"
    )
    with pytest.raises(SelectorError, match=message):
        make_plan(sites, config(key=INT8, value=INT8))
    assert selected(make_plan(sites, config(value=INT8))) == ["layers.0.value_states", "layers.1.value_states"]
    assert selected(make_plan(sites, config(key=INT8, ignore=("layers.1",)))) == ["layers.0.key_states"]


def test_ignored_sites_may_be_given_different_arguments(llama_sites: AttentionSites) -> None:
    groups = (scheme("re:.*self_attn$", key_states=INT8), scheme("re:.*layers.0.*", key_states=INT4))
    plan = make_plan(llama_sites, config(*groups, ignore=("model.layers.0",)))
    assert selected(plan) == in_layers([1, 2], ["key_states"])
