"""What a stored cache is, byte for byte, and which caches cannot be one: what was found there, and what to do."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_map, tree_structure

import graphquant as gq
from graphquant.errors import CalibrationError, ConvertError
from graphquant.loops import runnable
from graphquant.passes.editor import rebuild
from graphquant.passes.storage import Storage
from tests.passes.helpers import args
from tests.passes.modules import Plain, x_of
from tests.passes.stepping import (
    FORMATS,
    LENGTH,
    TOKENS,
    Cached,
    Growing,
    OddCached,
    Session,
    config,
    positions,
    program,
    quantizes,
    run,
    setting,
    stored,
)

FLOAT, INT8, UINT8, E4M3 = torch.float32, torch.int8, torch.uint8, torch.float8_e4m3fn
INT4 = config("states", args("channel", num_bits=4), args("channel", num_bits=4))
OUTPUTS = config("outputs", args("channel", num_bits=4), args("channel", num_bits=4))
WIDTHS = {"int8": (INT8, 1), "int5": (INT8, 1), "uint8-asym": (UINT8, 1), "e4m3": (E4M3, 1)}
WIDTHS |= dict.fromkeys(("int4-asym", "int2"), (UINT8, 2))
"""What a format is held in, and how many codes to a byte."""


@pytest.mark.parametrize("place", ["states", "outputs"])
@pytest.mark.parametrize("form", ["static", "inputs"])
@pytest.mark.parametrize("names", [("int8", "int4-asym"), ("int2", "int5"), ("e4m3", "uint8-asym")], ids=str)
def test_a_code_takes_one_byte_or_half_of_one(form: str, place: str, names: tuple[str, str]) -> None:
    floats = Session(program(form, FLOAT))
    session = Session(stored(form, place, setting(place, "channel", *names), FLOAT))
    for used in (session, floats):
        used.run(TOKENS[:1])
    tokens = LENGTH if form == "static" else TOKENS.shape[1]
    for name, held, before in zip(names, session.held(), floats.held(), strict=True):
        dtype, codes = WIDTHS[name]
        # torch cannot copy fp8 by index on CPUs: a buffer holds its bits.
        assert held.dtype == (UINT8 if (form, name) == ("static", "e4m3") else dtype)
        assert held.shape == ((1, 2, tokens, 8 // codes) if place == "states" else (1, tokens, 16 // codes))
        assert before.nbytes == 4 * codes * held.nbytes


@pytest.mark.parametrize(("place", "heads"), [("states", (2,)), ("outputs", ())])
@pytest.mark.parametrize("form", ["static", "inputs"])
def test_a_scale_of_a_token_lies_beside_its_codes(form: str, place: str, heads: tuple[int, ...]) -> None:
    quantized = stored(form, place, setting(place, "token", "int8", "int4-asym"), FLOAT)
    session = Session(quantized)
    session.run(TOKENS[:1])
    tokens = LENGTH if form == "static" else TOKENS.shape[1]
    each, wide = (1, *heads, tokens, 1), 8 if heads else 16
    assert [(held.dtype, tuple(held.shape)) for held in session.held()] == [
        (INT8, (*each[:-1], wide)),
        (FLOAT, each),
        (UINT8, (*each[:-1], wide // 2)),
        (FLOAT, each),
        (INT8, each),
    ]
    keys, values = ("", "_scale"), ("", "_scale", "_zero_point")
    if form == "static":
        buffers = {f"key_cache_0{part}" for part in keys} | {f"value_cache_0{part}" for part in values}
        assert {name for name in quantized.constants if "_cache_" in name} == buffers
        assert quantized.graph_signature.user_inputs == program(form, FLOAT).graph_signature.user_inputs
        assert quantized.state_dict.keys() == program(form, FLOAT).state_dict.keys()
        return
    past = [f"past_key_values_0_{index}{part}" for index, parts in enumerate((keys, values)) for part in parts]
    assert list(quantized.graph_signature.user_inputs) == ["input_ids", "attention_mask", *past]
    assert tree_structure(session.past) == tree_structure(((("codes", "s"), ("codes", "s", "z")),))
    example = quantized.example_inputs[1]["past_key_values"]
    dtypes = tree_map(lambda held: held.dtype, session.past)
    assert dtypes == tree_map(lambda held: held.dtype, example) == (((INT8, FLOAT), (UINT8, FLOAT, INT8)),)
    with torch.no_grad():
        assert runnable(quantized)(**quantized.example_inputs[1])[0].shape == (2, 4, 64)


def eager(target: Any, *arguments: Any, name: str | None = None, **options: Any) -> Any:
    """A builder of calls that makes them at once."""
    return target(*arguments, **options)


KINDS = {f"{kind}{bits}": args(type=kind, num_bits=bits) for kind in ("int", "uint") for bits in range(2, 9)}
KINDS |= {name: args(**FORMATS[name]) for name in ("e4m3", "e5m2")}


def all_codes(kind: str) -> Tensor:
    dtype = KINDS[kind].dtype
    if not dtype.is_float:
        return torch.arange(dtype.qmin, dtype.qmax + 1, dtype=FLOAT)
    values = torch.arange(256, dtype=UINT8).view(dtype.storage).float()
    return values[values.isfinite()]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[-1] in "234" and kind[0] != "e"])
def test_every_pair_of_codes_has_its_byte(kind: str) -> None:
    pairs = torch.cartesian_prod(all_codes(kind), all_codes(kind))
    storage = Storage.of(KINDS[kind], 2 * len(pairs), is_buffer=True, where="")
    held: Any = storage.store(eager, pairs.T.reshape(-1), "")
    first, second = (pairs - KINDS[kind].dtype.qmin).int().unbind(-1)
    assert (held.dtype, storage.dtype) == (UINT8, UINT8)
    assert torch.equal(held.int(), first | second << 4)
    assert torch.equal(storage.load(eager, held), pairs.T.reshape(-1))


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from([*KINDS]),
    shape=st.lists(st.integers(0, 3), max_size=3),
    half=st.integers(1, 9),
    is_buffer=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_loaded_is_what_was_stored(kind: str, shape: list[int], half: int, is_buffer: bool, seed: int) -> None:
    storage, values = Storage.of(KINDS[kind], 2 * half, is_buffer=is_buffer, where=""), all_codes(kind)
    codes = values[torch.randint(0, len(values), (*shape, 2 * half), generator=torch.Generator().manual_seed(seed))]
    held: Any = storage.store(eager, codes, "")
    assert (held.dtype, tuple(held.shape)) == (storage.dtype, (*shape, storage.stored_width))
    assert held.nbytes == codes.numel() // (2 if KINDS[kind].dtype.num_bits <= 4 else 1)
    loaded: Any = storage.load(eager, held)
    assert loaded.dtype == FLOAT
    assert torch.equal(loaded, codes)


@pytest.mark.parametrize("place", ["states", "outputs"])
@pytest.mark.parametrize(
    ("write", "added", "rows"),
    [("index_copy", "states", 2), ("index_put", "output", 2), ("index_put", "states", 1), ("index_put", "output", 1)],
)
def test_who_else_reads_the_states_reads_their_values(write: str, added: str, rows: int, place: str) -> None:
    chosen = {"states": INT4, "outputs": OUTPUTS}[place]
    convert = quantizes(Cached(added, "by position", write, rows=rows), positions(5, rows=rows), chosen)
    x, results = x_of(rows, 7), []
    for module in (runnable(convert(kv_cache="stored")), runnable(convert())):
        steps = [{"x": x[:, a:b], "position": torch.arange(a, b)} for a, b in ((0, 3), (3, 4), (4, 7))]
        results.append(torch.cat([module(**step).detach() for step in steps], dim=1))
    assert torch.equal(*results)


def also_read(cache: str, role: str, reader: str) -> str:
    what = f"the cache {cache} of attention_0.{role} is also read by {reader}, which expects floats"
    return f"{what}: leave the site out with ignore, or convert without kv_cache='stored'"


AT, TURN = positions(5), positions(5, turn=torch.ones(5))
PAST = {"x": x_of(2, 5), "past_keys": torch.zeros(2, 4, 3, 4), "past_values": torch.zeros(2, 4, 3, 4)}
QUERY = gq.QuantizationScheme(targets=("role:attention",), query_states=args())
NO_CACHE = "kv_cache='stored' needs a program with a KV cache in it: capture the model with cache='static' and "
NO_CACHE += "max_cache_len, or with cache='inputs'"
NO_SITE = "kv_cache='stored' stores keys and values, and none of the 1 planned sites is one that a cache holds: "
NO_SITE += "quantize key_states and value_states, or the outputs of k_proj and v_proj"
LATER = "attention_0.k_proj.output (node linear_1, stepping.py:LINE) cannot be stored: "
GONE = "what follows it reads the input turn, whose values for the earlier tokens are gone; quantize the states instead"
IN_PLACE = "clamp_ behind it writes in place; quantize the states instead"
ODD = "attention_0.key_states (node slice_2, stepping.py:LINE): int4 is stored two codes to a byte, and its last dim "
REFUSED: dict[str, tuple[torch.nn.Module, dict[str, Tensor], gq.QuantizationConfig, str]] = {
    "no cache": (Plain(), {"x": x_of()}, INT4, NO_CACHE),
    "queries alone": (Cached(), AT, gq.QuantizationConfig(config_groups={"": QUERY}), NO_SITE),
    "read before": (Cached("before"), AT, OUTPUTS, also_read("keys", "k_proj.output", "sum_1 (aten::sum)")),
    "read after": (Cached("after"), AT, INT4, also_read("keys", "key_states", "sum_1 (aten::sum)")),
    "present in part": (Growing(part=1), PAST, INT4, also_read("past_keys", "key_states", "slice_1 (aten::slice)")),
    "one past for both": (Growing(shared=True), PAST, INT4, also_read("past_keys", "key_states", "cat_1 (aten::cat)")),
    "turned by an input": (Cached(turned="by an input"), TURN, OUTPUTS, LATER + GONE),
    "turned in place": (Cached(turned="in place"), AT, OUTPUTS, LATER + IN_PLACE),
    "an odd head_dim": (OddCached(), AT, INT4, f"{ODD}3 is odd: use 5 to 8 bits"),
}


def refused(message: str, error: type[Exception] = ConvertError) -> Any:
    return pytest.raises(error, match=rf"^{re.escape(message).replace('LINE', '[0-9]+')}$")


@pytest.mark.parametrize("name", REFUSED)
def test_a_program_that_cannot_be_stored(name: str) -> None:
    module, batch, chosen, message = REFUSED[name]
    convert = quantizes(module, batch, chosen)
    convert()  # without kv_cache='stored' nothing is wrong with it
    with refused(message):
        convert(kv_cache="stored")


@pytest.fixture(scope="module")
def own() -> Any:
    return quantizes(Cached(), AT, INT4)


@pytest.mark.parametrize("given", ["x", "", True], ids=repr)
def test_another_word(own: Any, given: Any) -> None:
    with refused(f"unknown kv_cache {given!r}; there are 'stored' and None"):
        own(kv_cache=given)


SOURCES: dict[str, tuple[Any, str]] = {
    "decomposed": (
        lambda program, *_: program.run_decompositions(),
        "the cache keys of attention_0.key_states is written by index_put (aten::index_put); expected index_copy_ or "
        "index_put_ into the buffer itself: convert before run_decompositions, or without kv_cache='stored'",
    ),
    "in one memory": (
        lambda program, *_: rebuild(program, constants=program.constants | {"values": program.constants["keys"][:]}),
        "the cache keys of attention_0.key_states shares its memory with values: give each its own, or leave one out",
    ),
    "stored before": (
        lambda *given: gq.convert(*given, kv_cache="stored"),
        "the program was converted before (attention_0.key_states is quantized): give the original program, and one "
        "config with all that is to be quantized",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_was_made_of_a_program(own: Any, name: str) -> None:
    made, message = SOURCES[name]
    source = made(*own.args)
    with refused(message):
        gq.convert(source, *own.args[1:], kv_cache="stored")


def test_a_calibration_of_other_sites(own: Any) -> None:
    with refused(
        "the calibration has no statistics of attention_0.k_proj.output (node linear_1, stepping.py:LINE); it has 2 "
        "sites (attention_0.key_states, attention_0.value_states, …): calibrate with a config that selects this site",
        CalibrationError,
    ):
        gq.convert(*own.args[:2], OUTPUTS, kv_cache="stored")


def test_a_graph_of_one_token_a_step_stores_states_alone() -> None:
    chosen, steps = setting("states", "token", "int4-asym", "int8"), (1,) * 10
    one, any_number = (stored(form, "states", chosen, FLOAT) for form in ("one token", "static"))
    assert torch.equal(run(one, TOKENS[:1], steps), run(any_number, TOKENS[:1], steps))
    with refused(
        "model.layers.0.self_attn.k_proj.output (node linear_1, modeling_llama.py:LINE) cannot be stored in a graph of "
        "1 tokens a step: its states are computed after it is read, for all tokens. Convert the program with a dynamic "
        "sequence, then gq.specialize(program, sequence=1)"
    ):
        stored("one token", "outputs", setting("outputs", "token", "int8", "int8"), FLOAT)
