"""Captures with a KV cache in the graph: step by step they are the model without one, and share its calibration."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram
from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaForCausalLM

import graphquant as gq
from graphquant.capture import capture
from graphquant.errors import CaptureError
from graphquant.loops import runnable
from tests.tiny import VOCABULARY, tiny_batches, tiny_llama

LENGTH = 16
STEPS = ((5, 1, 1, 3), (1, 1, 1, 7), (10,))
STATIC: dict[str, Any] = {"cache": "static", "max_cache_len": LENGTH}
NO_CACHE = "is for a graph with a KV cache, and there is none: add"


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def static(model: LlamaForCausalLM) -> ExportedProgram:
    return capture(model, cache="static", max_cache_len=LENGTH)


@pytest.fixture(scope="module")
def growing(model: LlamaForCausalLM) -> ExportedProgram:
    return capture(model, cache="inputs")


def ids(rows: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, 10), generator=torch.Generator().manual_seed(2))


def stepwise_static(program: ExportedProgram, tokens: Tensor, steps: tuple[int, ...]) -> Tensor:
    module, start, logits = runnable(program), 0, []
    for step in steps:
        positions = torch.arange(start, start + step)
        logits.append(module(input_ids=tokens[:, start : start + step], cache_position=positions))
        start += step
    return torch.cat(logits, dim=1)


def stepwise_growing(program: ExportedProgram, tokens: Tensor, steps: tuple[int, ...]) -> Tensor:
    module, start, logits = runnable(program), 0, []
    layers = sum(str(name).startswith("past_key_values") for name in program.graph_signature.user_inputs) // 2
    past: Any = tuple((torch.zeros(len(tokens), 2, 0, 8), torch.zeros(len(tokens), 2, 0, 8)) for _ in range(layers))
    for step in steps:
        mask = torch.ones(len(tokens), start + step, dtype=torch.int64)
        out, past = module(input_ids=tokens[:, start : start + step], attention_mask=mask, past_key_values=past)
        logits.append(out)
        start += step
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("steps", STEPS, ids=str)
def test_prefill_and_decode_are_one_graph(
    model: LlamaForCausalLM, static: ExportedProgram, growing: ExportedProgram, steps: tuple[int, ...]
) -> None:
    one, three = ids(1), ids(3)
    with torch.no_grad():
        torch.testing.assert_close(stepwise_static(static, one, steps), model(one).logits)
        torch.testing.assert_close(stepwise_growing(growing, three, steps), model(three).logits)


def test_the_cache_is_buffers_that_a_run_writes_to(static: ExportedProgram, model: LlamaForCausalLM) -> None:
    caches = {f"{kind}_cache_{index}" for kind in ("key", "value") for index in range(2)}
    assert caches <= set(static.graph_signature.buffers)
    assert static.state_dict.keys() == model.state_dict().keys()  # what is cached is no weight
    assert set(static.run_decompositions().graph_signature.buffers_to_mutate.values()) == caches
    assert all(int(static.constants[name].count_nonzero()) == 0 for name in caches)
    assert [str(name) for name in static.graph_signature.user_inputs] == ["input_ids", "cache_position"]


def test_the_end_of_the_cache_is_an_error(static: ExportedProgram) -> None:
    with pytest.raises(Exception, match="index"):
        runnable(static)(input_ids=ids(1)[:, :4], cache_position=torch.arange(14, 18))
    with pytest.raises(Exception, match="16"):
        runnable(static)(input_ids=ids(1).repeat(1, 2), cache_position=torch.arange(20))


def test_the_model_is_left_as_it_was(model: LlamaForCausalLM) -> None:
    config, generation = copy.deepcopy(model.config), copy.deepcopy(model.generation_config)
    before = list(model.state_dict()), list(dict(model.named_buffers())), type(model)
    capture(model, cache="static", max_cache_len=LENGTH)
    capture(model, cache="inputs")
    assert (list(model.state_dict()), list(dict(model.named_buffers())), type(model)) == before
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config.to_dict(), generation.to_dict())
    assert isinstance(model(ids(1)).logits, Tensor)


@pytest.mark.parametrize("form", ["static", "growing"])
def test_a_calibration_without_a_cache_converts_the_graph_with_one(
    model: LlamaForCausalLM, form: str, request: pytest.FixtureRequest
) -> None:
    config, program = gq.preset("int8-kv-attn-head"), request.getfixturevalue(form)
    prepared = gq.prepare(model, config)
    calibration = gq.calibrate(prepared, tiny_batches(), progress=False)
    quantized = gq.convert(program, calibration, config)
    steps = stepwise_static if form == "static" else stepwise_growing
    gq.set_mode(prepared, "fake_quant")
    tokens = ids(1)
    with torch.no_grad():
        expected = prepared(input_ids=tokens, attention_mask=torch.ones_like(tokens))
        torch.testing.assert_close(steps(quantized, tokens, (4, 1, 5)), expected)
    other = gq.convert(prepared)
    scale = "model.layers.1.self_attn.key_states_scale"
    assert torch.equal(quantized.state_dict[scale], other.state_dict[scale])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "paged"}, r"unknown cache 'paged'; there are 'static', 'inputs' and None$"),
        ({"cache": "static"}, r'cache="static" and max_cache_len=… \(in tokens\) are given together'),
        ({"max_cache_len": 8}, r'cache="static" and max_cache_len=… \(in tokens\) are given together'),
        ({"cache": "static", "max_cache_len": 1}, r"max_cache_len must be at least 2 tokens, not 1$"),
        (
            {"cache": "inputs", "example_args": (ids(1),)},
            r"cache='inputs' is for a Hugging Face causal model, and",
        ),
        ({"cache": "static", "max_cache_len": True}, r"max_cache_len must be at least 2 tokens, not True$"),
        ({"cache": "static", "max_cache_len": 8.0}, r"max_cache_len must be at least 2 tokens, not 8\.0$"),
        ({"sequence": 1}, rf'sequence=1 {NO_CACHE} cache="static" or cache="inputs", or leave sequence out$'),
        ({"batch": 2}, rf'batch=2 {NO_CACHE} cache="static", or leave batch out$'),
        (
            {"sequence": 1, "example_args": (ids(1),)},
            rf'sequence=1 {NO_CACHE} cache="static" or cache="inputs", or leave sequence out$',
        ),
        (STATIC | {"sequence": True}, r"sequence must be an int of at least 1 token, or None, not True$"),
        (STATIC | {"sequence": 0}, r"sequence must be an int of at least 1 token, or None, not 0$"),
        (STATIC | {"batch": True}, r"batch must be an int of at least 1 row, or None, not True$"),
        (STATIC | {"batch": -1}, r"batch must be an int of at least 1 row, or None, not -1$"),
        (STATIC | {"batch": 2.0}, r"batch must be an int of at least 1 row, or None, not 2\.0$"),
        ({"cache": "inputs", "sequence": "1"}, r"sequence must be an int of at least 1 token, or None, not '1'$"),
        (
            STATIC | {"sequence": LENGTH + 1},
            r"sequence=17 does not fit into a cache of max_cache_len=16 tokens: make one of them fit the other$",
        ),
        (
            {"cache": "inputs", "sequence": 1, "batch": 2},
            r'batch=2 is for cache="static", and cache="inputs" was given, whose batch is dynamic: leave batch out, '
            r"and run the program on any$",
        ),
    ],
)
def test_options_that_mean_nothing(model: LlamaForCausalLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=rf"^{message}"):
        capture(model, **options)


def test_a_program_has_its_cache_already(static: ExportedProgram) -> None:
    with pytest.raises(CaptureError, match=r"and an ExportedProgram was given: leave one out$"):
        capture(static, cache="inputs")


@pytest.mark.parametrize("given", [{"sequence": 1}, {"batch": 2}, STATIC | {"sequence": 1}], ids=str)
def test_a_program_has_its_shapes_already(static: ExportedProgram, given: dict[str, Any]) -> None:
    name, value = list(given.items())[-1]
    message = (
        rf"^{name}={value} is for a model, and an ExportedProgram was given, whose shapes are made: capture its model "
        rf"with {name}={value}, or leave {name} out$"
    )
    with pytest.raises(CaptureError, match=message):
        capture(static, **given)


def test_a_state_that_is_no_keys_and_values_is_refused() -> None:
    config = Lfm2Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        layer_types=["conv", "full_attention"],
    )
    message = r"^layer 0 of Lfm2ForCausalLM keeps a \w+; expected keys and values alone: capture it with cache=None$"
    with pytest.raises(CaptureError, match=message):
        capture(Lfm2ForCausalLM(config).eval(), cache="inputs")
