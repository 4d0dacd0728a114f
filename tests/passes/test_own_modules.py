"""Sites with something about them: overwritten, returned, read by others too, inputs of the program, caches."""

import copy
import pickle

import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.config import KVCacheScheme
from graphquant.errors import ConvertError, SelectorError
from graphquant.records import records
from tests.passes.helpers import STRATEGIES, args, assert_converts_exactly, assert_same, both, calibrated, config, run
from tests.passes.modules import (
    HEAD_DIM,
    Cached,
    EnableGQA,
    Filled,
    FilledLater,
    KeysAreValues,
    Overwritten,
    Parallel,
    Plain,
    Present,
    export,
    exported,
    x_of,
)

BATCHES = [{"x": x_of(3, 5)}, {"x": x_of(1, 9)}]
STATES, OUTPUTS, INPUTS = (config(where, args()) for where in ("states", "outputs", "inputs"))
REFUSED = [
    ("the states", "states", "key_states"),
    ("what the states view", "states", "key_states"),
    ("what the states view", "outputs", "k_proj.output"),
    ("a part of the states", "states", "key_states"),
    ("before the states", "outputs", "k_proj.output"),
]


@pytest.mark.parametrize(("how", "where", "site"), REFUSED)
def test_a_site_that_is_overwritten_in_place_is_refused(how: str, where: str, site: str) -> None:
    program = exported(Overwritten, how)
    source = rf"^attention_0\.{site} \(node \w+, modules\.py:\d+\)"
    message = rf"{source} is overwritten in place by mul_ \(aten\.mul_\.Tensor\): use an out-of-place op"
    with pytest.raises(ConvertError, match=message):
        gq.prepare(program, config(where, args()))
    calibration = gq.calibrate(gq.prepare(program, INPUTS), BATCHES, progress=False)
    with pytest.raises(ConvertError, match=message):
        gq.convert(program, calibration, config(where, args("token")))


@pytest.mark.parametrize(
    ("how", "c"),
    [("before the states", STATES), ("the states", OUTPUTS), ("a part of the states", OUTPUTS), ("the states", INPUTS)],
)
def test_a_write_that_a_copy_does_not_miss_is_no_hindrance(how: str, c: gq.QuantizationConfig) -> None:
    program = exported(Overwritten, how)
    prepared = gq.prepare(program, c)
    for batch in BATCHES:
        assert_same(prepared(**batch).detach(), run(program, batch))
    assert_converts_exactly(prepared, BATCHES)


def test_keys_that_are_filled_after_they_were_allocated() -> None:
    """Their node computes nothing: what is observed and quantized is what the last write leaves."""
    program = exported(Filled)
    prepared = gq.prepare(program, STATES)
    for batch in BATCHES:
        assert_same(prepared(**batch).detach(), run(program, batch))
    model = Filled()
    with torch.no_grad():
        parts = torch.tensor([1.0] * 3 + [2.0] * (HEAD_DIM - 3))
        amax = max(float((model.heads(model.k_proj(batch["x"])) * parts).abs().max()) for batch in BATCHES)
    assert gq.calibrate(prepared, BATCHES, progress=False)["attention_0.key_states"].amax == amax
    assert_converts_exactly(prepared, BATCHES)
    gq.set_mode(prepared, "fake_quant")
    assert not torch.equal(prepared(**BATCHES[0]), run(program, BATCHES[0]))


def test_keys_that_are_read_before_they_are_filled_are_refused() -> None:
    with pytest.raises(ConvertError, match=r"key_states .* is read by \w+ before \w+ has filled it: fill it first"):
        gq.prepare(exported(FilledLater), STATES)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_site_that_the_program_returns_is_returned_quantized(strategy: str) -> None:
    program = exported(Present)
    prepared = calibrated(program, config("states", args(strategy, num_bits=4)), BATCHES)
    assert_converts_exactly(prepared, BATCHES)
    quantized = gq.convert(prepared)
    result, original = (p.module()(**BATCHES[0]) for p in (quantized, program))
    assert result.keys() == original.keys() == {"out", "present"}
    for mine, theirs in zip(result["present"], original["present"], strict=True):
        assert mine.shape == theirs.shape
        assert not torch.equal(mine, theirs)
        assert len(mine.unique()) < len(theirs.unique())
    before, after = (p.graph_signature.output_specs for p in (program, quantized))
    assert [spec.kind for spec in after] == [spec.kind for spec in before]
    dequantized = [f"attention_0_{role}_states_dequantize" for role in ("key", "value")]
    assert [spec.arg.name for spec in after] == [before[0].arg.name, *dequantized]
    assert quantized.call_spec.out_spec == program.call_spec.out_spec


def test_the_whole_model_may_be_one_attention() -> None:
    program = exported(Plain)
    assert {site.node for site in gq.find_attention(program) if site.role.endswith("input")} == {"x"}
    everything = both(INPUTS, OUTPUTS, STATES)
    prepared = calibrated(program, everything, BATCHES)
    assert_converts_exactly(prepared, BATCHES)
    nodes = [node.name for node in gq.convert(prepared).graph.nodes]
    assert nodes.index("x") < nodes.index("attention_0_q_proj_input_quantize") < nodes.index("linear")


def test_only_the_projections_read_their_quantized_input() -> None:
    program = exported(Parallel)
    prepared = calibrated(program, INPUTS, BATCHES)
    assert_converts_exactly(prepared, BATCHES)
    quantized = gq.convert(prepared)
    nodes = {node.name: node for node in quantized.graph.nodes}
    pair = ["attention_0_q_proj_input_quantize", "attention_0_q_proj_input_dequantize"]
    readers = {user.name for user in nodes["x"].users if user.op == "call_function" and "sym_size" not in user.name}
    assert readers == {pair[0], "linear", "add"}  # the feed-forward beside the attention, and the residual sum
    assert [user.name for user in nodes[pair[1]].users] == ["linear_1", "linear_2", "linear_3"]


@pytest.mark.parametrize("letter", ["q", "k", "v"])
def test_only_the_chosen_projection_reads_the_quantized_input(letter: str) -> None:
    scheme = gq.QuantizationScheme(targets=(f"role:{letter}_proj",), input_activations=args())
    prepared = calibrated(exported(Plain), gq.QuantizationConfig(config_groups={"one": scheme}), BATCHES)
    assert_converts_exactly(prepared, BATCHES)
    quantized = gq.convert(prepared)
    (node, record), *_ = records(quantized)
    assert (record.site, record.also) == (f"attention_0.{letter}_proj.input", ())
    assert [user.args[1].name for user in node.users] == [f"p_{letter}_proj_weight"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_heads_that_sdpa_repeats(strategy: str) -> None:
    program = exported(EnableGQA)
    prepared = calibrated(program, both(config("states", args(strategy)), config("outputs", args(strategy))), BATCHES)
    sites = gq.find_attention(program)
    assert [sites[f"attention_0.{role}_states"].layout.heads for role in ("query", "key", "value")] == [4, 2, 2]
    assert_converts_exactly(prepared, BATCHES)


def test_keys_that_are_values_have_one_pair() -> None:
    program = exported(KeysAreValues)
    prepared = calibrated(program, both(STATES, config("outputs", args("channel"))), BATCHES)
    assert_converts_exactly(prepared, BATCHES)
    quantized = gq.convert(prepared)
    targets = [str(node.target) for node in quantized.graph.nodes]
    for kind in ("quantize", "dequantize"):  # query states and shared states; q and the shared linear
        assert targets.count(f"quantized_decomposed.{kind}_per_tensor.default") == 2
        assert targets.count(f"quantized_decomposed.{kind}_per_channel.default") == 2
    also = {record.site: record.also for _, record in records(quantized)}
    assert also["attention_0.key_states"] == ("attention_0.value_states",)
    only = gq.QuantizationConfig(kv_cache_scheme=KVCacheScheme(key=args()))
    with pytest.raises(SelectorError, match="are one tensor"):
        gq.prepare(program, only)


@pytest.fixture(scope="module")
def cached() -> ExportedProgram:
    return export(Cached(), x=x_of(1, 2), position=torch.arange(2))


WHOLE = {"x": x_of(1, 8), "position": torch.arange(8)}


def is_empty(program: ExportedProgram) -> bool:
    return not any(program.state_dict[name].any() for name in ("keys", "values"))


def in_one_call(program: ExportedProgram) -> Tensor:
    with torch.no_grad():
        result: Tensor = copy.deepcopy(program.module())(**WHOLE)
    return result


def in_steps(program: ExportedProgram, forgetting: bool = False) -> Tensor:
    """A token at a time, the cache kept from step to step, or emptied before each."""
    module = copy.deepcopy(program.module())
    steps = []
    with torch.no_grad():
        for index in range(8):
            module = copy.deepcopy(program.module()) if forgetting else module
            steps.append(module(x=WHOLE["x"][:, index : index + 1], position=WHOLE["position"][index : index + 1]))
    return torch.cat(steps, 1)


@pytest.mark.parametrize("dialect", ["pt2e", "aten"])
def test_a_cache_is_written_quantized_and_read_at_later_steps(cached: ExportedProgram, dialect: str) -> None:
    prepared = calibrated(cached, config("states", args("attn_head", num_bits=4)), [WHOLE])
    quantized = gq.convert(prepared, dialect=dialect)
    assert is_empty(cached)
    assert is_empty(quantized)  # what calibration wrote is not in it
    expected = in_one_call(quantized)
    assert (in_steps(quantized) - expected).abs().mean() < 1e-3  # a value between two codes may go to either
    assert (in_one_call(cached) - expected).abs().mean() > 1e-2
    assert (in_steps(quantized, forgetting=True) - expected)[:, 1:].abs().mean() > 1e-2


def test_a_pickled_module_has_the_empty_cache(cached: ExportedProgram) -> None:
    prepared = calibrated(cached, STATES, [WHOLE])
    assert prepared.get_buffer("keys").any()
    quantized = gq.convert(pickle.loads(pickle.dumps(prepared)))
    assert is_empty(quantized)
    assert torch.equal(in_one_call(quantized), in_one_call(gq.convert(prepared)))
