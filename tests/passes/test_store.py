"""A cache of codes: step by step it gives what fake-quant gives of the whole sequence, in a part of the bytes."""

import copy
import io
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram
from transformers import MistralForCausalLM, Qwen3ForCausalLM

import graphquant as gq
from graphquant.records import records
from tests.passes.helpers import STRATEGIES, args, both
from tests.passes.stepping import (
    LENGTH,
    ONES,
    TOKENS,
    Session,
    calibration,
    config,
    empty_past,
    fake_quantized,
    model,
    program,
    run,
    setting,
    stored,
)
from tests.tiny import VOCABULARY, tiny_llama

PLACES, FORMS = ("states", "outputs"), ("static", "static-3", "inputs")
MAIN = ("int8", "int4-asym", "uint8-asym", "e4m3", "e5m2")
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}


def check_cell(form: str, place: str, strategy: str, key: str, value: str) -> None:
    """Every batch that a form takes gives what fake-quant gives, which is not what the float model gives."""
    chosen = setting(place, strategy, key, value)
    quantized, expected = stored(form, place, chosen), fake_quantized(chosen)
    assert [record.stored is not None for _, record in records(quantized)] == [True, True]
    for rows in {"static": (1,), "static-3": (3,), "inputs": (1, 3)}[form]:
        logits = run(quantized, TOKENS[:rows])
        torch.testing.assert_close(logits, expected[:rows], **EXACT)
    assert (logits - run(program(form), TOKENS[:rows])).abs().max() > 1e-5


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("form", "strategy"),
    [*((form, strategy) for strategy in STRATEGIES for form in ("static", "inputs")), ("static-3", "token")],
)
def test_every_strategy_in_every_form(form: str, strategy: str, place: str) -> None:
    check_cell(form, place, strategy, "int8", "int4-asym")


@pytest.mark.parametrize("form", ["static", "inputs"])
@pytest.mark.parametrize(
    ("key", "value"),
    [("uint8-asym", "int4"), ("e4m3", "int2"), ("int3", "e5m2"), ("int7", "int5"), ("int6", "int8")],
)
def test_every_format_in_every_form(form: str, key: str, value: str) -> None:
    check_cell(form, "outputs", "channel", key, value)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("key", MAIN)
def test_every_combination(form: str, place: str, strategy: str, key: str) -> None:
    check_cell(form, place, strategy, key, {"int8": "int3"}.get(key, "int8"))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("form", "dtype"), [("static", torch.float32), ("inputs", torch.float32), ("static", torch.bfloat16)], ids=str
)
def test_a_cache_of_codes_is_a_cache_of_their_values(form: str, dtype: torch.dtype, place: str) -> None:
    chosen = config(place, args("token", num_bits=4), args("channel"))
    floats = gq.convert(program(form, dtype), calibration(place), chosen)
    tokens = TOKENS if form == "inputs" else TOKENS[:1]
    assert torch.equal(run(stored(form, place, chosen, dtype), tokens), run(floats, tokens))


@pytest.mark.parametrize("place", PLACES)
def test_padding_is_not_looked_at(place: str) -> None:
    chosen, mask = setting(place, "token", "int4-asym", "int8"), ONES["attention_mask"].clone()
    mask[1, :3] = 0
    logits = run(stored("inputs", place, chosen), TOKENS, mask=mask)
    torch.testing.assert_close(logits, fake_quantized(chosen, ONES | {"attention_mask": mask}), **EXACT)


def test_of_sites_behind_each_other_the_one_nearest_to_the_core_is_stored() -> None:
    four, token = args("channel", num_bits=4), args("token")
    chosen = both(config("outputs", four, token, query=four), config("states", token, query=token))
    prepared = gq.prepare(program("none"), chosen)
    seen = gq.calibrate(prepared, [ONES], progress=False)
    gq.set_mode(prepared, "fake_quant")
    for dialect in ("pt2e", "aten"):
        quantized = gq.convert(program("inputs"), seen, chosen, kv_cache="stored", dialect=dialect)
        torch.testing.assert_close(run(quantized, TOKENS), prepared(**ONES).detach(), **EXACT)
        kept = {record.site.rpartition("self_attn.")[2] for _, record in records(quantized) if record.stored}
        assert kept == {"key_states", "v_proj.output"}
        assert len(list(records(quantized))) == 5


@pytest.mark.parametrize("form", ["static", "inputs"])
def test_a_prepared_module_is_converted(form: str) -> None:
    """One that saw its batches through the cache of its own program, and that was trained since."""
    chosen = setting("outputs", "channel", "int4-asym", "int8")
    prepared = copy.deepcopy(gq.prepare(program(form), chosen))
    rows = {"static": 1, "inputs": 3}[form]
    batch: dict[str, Any] = {"input_ids": TOKENS[:rows], "cache_position": torch.arange(10)}
    if form == "inputs":
        batch = ONES | {"past_key_values": empty_past(program(form), rows)}
    gq.calibrate(prepared, [batch], progress=False)
    with torch.no_grad():
        prepared.get_parameter("model.layers.0.self_attn.k_proj.weight").mul_(0.5)
    quantized = gq.convert(prepared, kv_cache="stored")
    gq.set_mode(prepared, "fake_quant")
    with torch.no_grad():
        expected = prepared(**batch)
    expected = expected if form == "static" else expected[0]
    torch.testing.assert_close(run(quantized, TOKENS[:rows]), expected, **EXACT)


FAMILIES: dict[str, Any] = {
    "MHA": lambda: tiny_llama(num_hidden_layers=1, num_key_value_heads=4),
    "MQA": lambda: tiny_llama(num_hidden_layers=1, num_key_value_heads=1),
    "two layers of GQA": tiny_llama,
    "Qwen3": lambda: other_family(Qwen3ForCausalLM, head_dim=8),
    "Mistral": lambda: other_family(MistralForCausalLM, sliding_window=4),
}


def other_family(family: Any, **changes: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    built = family(family.config_class(**sizes, num_hidden_layers=1, vocab_size=VOCABULARY, **changes)).eval()
    for name, parameter in built.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return built


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_before_rotary_embedding_in_other_attention(name: str) -> None:
    captured = gq.capture(FAMILIES[name]().double(), cache="static", max_cache_len=LENGTH)
    prepared = gq.prepare(captured, config("outputs", args("channel", num_bits=4)))
    batch = {"input_ids": TOKENS[:1], "cache_position": torch.arange(10)}
    gq.calibrate(prepared, [batch], progress=False)
    quantized = gq.convert(prepared, kv_cache="stored")
    gq.set_mode(prepared, "fake_quant")
    with torch.no_grad():
        torch.testing.assert_close(run(quantized, TOKENS[:1]), prepared(**batch), **EXACT)


def test_the_second_step_sees_the_first_token() -> None:
    chosen = setting("outputs", "token", "int4-asym", "int8")
    for form in ("static", "inputs"):
        quantized, other = stored(form, "outputs", chosen), TOKENS[:1].clone()
        other[0, 0] = (other[0, 0] + 1) % VOCABULARY
        changed = (run(quantized, other, (1,) * 10) - run(quantized, TOKENS[:1], (1,) * 10)).abs().amax((0, 2))
        assert (changed > 1e-4).all()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("form", "rows"), [("static-3", 3), ("inputs", 4)])
def test_rows_that_are_the_same_give_the_same(form: str, rows: int, place: str) -> None:
    chosen = setting(place, "token", "int4-asym", "int8")
    session = Session(stored(form, place, chosen), rows)
    logits = session.run(TOKENS[:1].expand(rows, -1))
    torch.testing.assert_close(logits, logits[:1].expand_as(logits), **EXACT)
    for held in session.held():
        assert len(held) == rows
        assert torch.equal(held, held[:1].expand_as(held))


@pytest.mark.parametrize("place", PLACES)
def test_a_fresh_module_has_no_leftovers(place: str) -> None:
    quantized = stored("static", place, setting(place, "token", "int4-asym", "int8"))
    expected, other = run(quantized, TOKENS[:1]), run(quantized, TOKENS[1:2])
    assert not torch.equal(other, expected)
    assert torch.equal(run(quantized, TOKENS[:1]), expected)
    used = Session(quantized)
    used.run(TOKENS[1:2])
    used.seen = 0  # a used module begins anew where the first token is written over
    assert torch.equal(used.run(TOKENS[:1]), expected)


def test_it_decomposes() -> None:
    quantized = stored("static", "outputs", setting("outputs", "token", "int4", "e4m3"))
    assert not [node for node in quantized.graph.nodes if "quantized_decomposed" in str(node.target)]
    decomposed = quantized.run_decompositions()
    torch.testing.assert_close(run(decomposed, TOKENS[:1]), run(quantized, TOKENS[:1]), **EXACT)
    written = {f"{kind}_cache_0{suffix}" for kind in ("key", "value") for suffix in ("", "_scale")}
    assert set(decomposed.graph_signature.buffers_to_mutate.values()) == written


@pytest.mark.parametrize(("form", "strategy"), [("static", "token"), ("inputs", "channel"), ("inputs", "token")])
def test_it_saves_and_loads(form: str, strategy: str) -> None:
    quantized, file = stored(form, "outputs", setting("outputs", strategy, "int4-asym", "e4m3")), io.BytesIO()
    torch.export.save(quantized, file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert torch.equal(run(loaded, TOKENS[:1]), run(quantized, TOKENS[:1]))
    assert [record for _, record in records(loaded)] == [record for _, record in records(quantized)]
    assert all(record.stored for _, record in records(loaded))
    assert gq.report(loaded).rows == gq.report(quantized).rows
    assert loaded.state_dict.keys() == quantized.state_dict.keys()
    limits = [list(map(str, given.range_constraints.values())) for given in (loaded, quantized)]
    assert limits[0] == limits[1]


def everything(given: ExportedProgram, used: Any, seen: gq.Calibration) -> tuple[Any, ...]:
    tensors = {**given.state_dict, **given.constants, **used.state_dict(prefix="model ")}
    tensors |= {f"{key} {name}": value for key in seen for name, value in seen[key].state.items()}
    values = {name: (value.dtype, value.tolist()) for name, value in tensors.items()}
    return str(given.graph), str(given.graph_signature), str(given.example_inputs), list(given._guards_code), values


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", ["static", "inputs"])
def test_what_is_converted_is_left_as_it_was(form: str, place: str) -> None:
    chosen = setting(place, "token", "int4-asym", "int8")
    before = copy.deepcopy(everything(program(form), model(), calibration(place)))
    first, second = stored(form, place, chosen), stored(form, place, chosen)
    session = Session(first)
    assert torch.equal(session.run(TOKENS[:1]), run(second, TOKENS[:1]))
    assert any(bool(held.count_nonzero()) for held in session.held())
    assert everything(program(form), model(), calibration(place)) == before
    caches = [name for name in first.constants if "_cache_" in name]
    assert [int(first.constants[name].count_nonzero()) for name in caches] == [0] * len(caches)
    caches = ["key_cache_0", "value_cache_0"] if form == "static" else []
    assert [int(program(form).constants[name].count_nonzero()) for name in caches] == [0] * len(caches)
