"""Captures of a constant sequence or batch: graphs that decode, rows beside each other, and the end of the cache."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import MistralForCausalLM, PreTrainedModel, Qwen3ForCausalLM

import graphquant as gq
from graphquant.capture import capture
from graphquant.loops import runnable
from tests.test_capture_caches import LENGTH, STATIC, ids, stepwise_growing, stepwise_static
from tests.tiny import VOCABULARY, tiny_batches, tiny_llama

SINGLE = (1,) * 10
FAMILIES = {"mistral": (MistralForCausalLM, {"sliding_window": 4}), "qwen3": (Qwen3ForCausalLM, {"head_dim": 8})}


@cache
def model(name: str = "llama") -> PreTrainedModel:
    """The tiny Llama; or one layer of another family, of its sizes and with random norms."""
    if name == "llama":
        return tiny_llama()
    family, changes = FAMILIES[name]
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    built = family(family.config_class(**sizes, num_hidden_layers=1, vocab_size=VOCABULARY, **changes)).eval()
    for key, parameter in built.named_parameters():
        if "norm" in key:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return built


@cache
def program(form: str, sequence: int | None = None, batch: int | None = None, name: str = "llama") -> ExportedProgram:
    options = STATIC | {"batch": batch} if form == "static" else {"cache": "inputs"}
    return capture(model(name), sequence=sequence, **options)


def stepwise(form: str, graph: ExportedProgram, tokens: Tensor, steps: tuple[int, ...] = SINGLE) -> Tensor:
    with torch.no_grad():
        return (stepwise_static if form == "static" else stepwise_growing)(graph, tokens, steps)


def whole(tokens: Tensor, name: str = "llama") -> Tensor:
    """What a model computes of all tokens at once, without a cache."""
    with torch.no_grad():
        return model(name)(tokens, use_cache=False).logits


@pytest.mark.parametrize(
    ("form", "sequence", "batch", "rows", "steps"),
    [
        ("static", 1, None, 1, SINGLE),
        ("static", 1, 3, 3, SINGLE),
        ("static", None, 3, 3, (5, 1, 1, 3)),
        ("inputs", 1, None, 1, SINGLE),
        ("inputs", 1, None, 3, SINGLE),
        ("inputs", 2, None, 3, (2,) * 5),
    ],
)
def test_step_by_step_it_is_the_model(
    form: str, sequence: int | None, batch: int | None, rows: int, steps: tuple[int, ...]
) -> None:
    tokens = ids(rows)
    torch.testing.assert_close(stepwise(form, program(form, sequence, batch), tokens, steps), whole(tokens))


@pytest.mark.parametrize(
    ("name", "form", "sequence", "steps"),
    [
        ("mistral", "static", 1, SINGLE),
        ("mistral", "static", None, (5, 1, 1, 3)),
        ("mistral", "inputs", 1, SINGLE),
        ("qwen3", "static", 1, SINGLE),
        ("qwen3", "inputs", 1, SINGLE),
    ],
)
def test_windows_and_norms_step_by_step(name: str, form: str, sequence: int | None, steps: tuple[int, ...]) -> None:
    tokens = ids(1)
    torch.testing.assert_close(stepwise(form, program(form, sequence, None, name), tokens, steps), whole(tokens, name))


def test_windows_and_norms_make_a_difference() -> None:
    """Were they without effect on these models, the test above would pass without them in the graph."""
    tokens, plain = ids(1), tiny_llama(num_hidden_layers=1)
    for name in FAMILIES:
        plain.load_state_dict(model(name).state_dict(), strict=False)  # all but the norms of q and k
        with torch.no_grad():
            ours, theirs = whole(tokens, name), plain(tokens, use_cache=False).logits
        assert not torch.allclose(ours[:, -1], theirs[:, -1], atol=1e-3), name
        if name == "mistral":  # whose window holds the first four tokens
            torch.testing.assert_close(ours[:, :4], theirs[:, :4])


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With more, torch's sdpa on a CPU itself differs from row to row by a rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_rows_that_are_alike_stay_alike() -> None:
    tokens = ids(1)
    module = runnable(program("static", 1, 4))
    for position in range(10):
        step = tokens[:, position : position + 1].expand(4, 1)
        with torch.no_grad():
            logits = module(input_ids=step, cache_position=torch.tensor([position]))
        assert torch.equal(logits, logits[:1].expand_as(logits))
    torch.testing.assert_close(logits[:1], whole(tokens)[:, -1:])
    for name in ("key_cache_0", "value_cache_0", "key_cache_1", "value_cache_1"):
        rows = module.get_buffer(name)
        assert torch.equal(rows, rows[:1].expand_as(rows))
        assert bool(rows[:, :, :10].any(-1).all())
        assert not bool(rows[:, :, 10:].any())


def shape(graph: ExportedProgram, name: str) -> list[int | str]:
    """The shape of an input or buffer; of a dynamic dim only that it is one."""
    (node,) = (node for node in graph.graph.nodes if node.name == name)
    return [dim if isinstance(dim, int) else "?" for dim in node.meta["val"].shape]


def test_the_shapes_are_those_that_were_asked_for() -> None:
    static, prefill, growing = program("static", 1, 3), program("static", None, 3), program("inputs", 1)
    assert [shape(static, name) for name in ("input_ids", "cache_position")] == [[3, 1], [1]]
    assert [shape(prefill, name) for name in ("input_ids", "cache_position")] == [[3, "?"], ["?"]]
    assert shape(static, "b_key_cache_1") == shape(prefill, "b_value_cache_0") == [3, 2, LENGTH, 8]
    assert [shape(growing, name) for name in ("input_ids", "attention_mask")] == [["?", 1], ["?", "?"]]
    assert shape(growing, "past_key_values_1_0") == ["?", 2, "?", 8]
    assert all(
        int(graph.constants[f"key_cache_{index}"].count_nonzero()) == 0
        for graph in (static, prefill)
        for index in (0, 1)
    )


def test_other_shapes_are_an_error() -> None:
    position = torch.tensor([0])
    for rows, length in ((3, 2), (2, 1)):
        with pytest.raises(AssertionError, match="input_ids"):
            runnable(program("static", 1, 3))(input_ids=ids(rows)[:, :length], cache_position=position)
    with pytest.raises(AssertionError, match="input_ids"):
        stepwise("inputs", program("inputs", 1), ids(2), (2,))


@pytest.mark.parametrize("core", [False, True], ids=["training", "core"])
@pytest.mark.parametrize("position", [LENGTH, LENGTH + 1, 10 * LENGTH])
def test_past_the_end_is_an_error_that_writes_nothing(position: int, core: bool) -> None:
    module = runnable(end(core))
    last = {"input_ids": ids(2)[:, :1], "cache_position": torch.tensor([LENGTH - 1])}
    with torch.no_grad():
        module(**last)
    before = {name: module.get_buffer(name).clone() for name in ("key_cache_0", "value_cache_0")}
    assert all(bool(cache[:, :, -1].any()) and not bool(cache[:, :, :-1].any()) for cache in before.values())
    with torch.no_grad(), pytest.raises(IndexError, match=rf"index {position} is out of bounds"):
        module(input_ids=ids(2)[:, 1:2], cache_position=torch.tensor([position]))
    assert all(torch.equal(module.get_buffer(name), cache) for name, cache in before.items())


@cache
def end(core: bool) -> ExportedProgram:
    graph = capture(tiny_llama(num_hidden_layers=1), sequence=1, **STATIC | {"batch": 2})
    return graph.run_decompositions() if core else graph


@pytest.mark.parametrize("form", ["static", "inputs"])
def test_sites_are_those_of_the_graph_with_a_dynamic_sequence(form: str) -> None:
    batch = 3 if form == "static" else None
    decode, dynamic = (gq.find_attention(program(form, sequence, batch)) for sequence in (1, None))
    assert [(site.key, site.layout) for site in decode] == [(site.key, site.layout) for site in dynamic]
    assert len(decode) == 2 * 9
    assert decode.near_misses == dynamic.near_misses == ()


@cache
def prepared() -> Any:
    """Calibrated without a cache."""
    made = gq.prepare(model(), gq.preset("int8-kv-attn-head"))
    gq.calibrate(made, tiny_batches(), progress=False)
    gq.set_mode(made, "fake_quant")
    return made


@pytest.mark.parametrize("form", ["static", "inputs"])
def test_one_calibration_converts_both_graphs(form: str) -> None:
    config, tokens, batch = gq.preset("int8-kv-attn-head"), ids(3), 3 if form == "static" else None
    calibration = gq.calibration_of(prepared())
    decode, dynamic = (gq.convert(program(form, sequence, batch), calibration, config) for sequence in (1, None))
    with torch.no_grad():
        expected = prepared()(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    assert not torch.allclose(expected, whole(tokens))
    torch.testing.assert_close(stepwise(form, decode, tokens), expected)
    torch.testing.assert_close(stepwise(form, dynamic, tokens, (5, 1, 1, 3)), expected)
    scales = [name for name in decode.state_dict if name.endswith("_scale")]
    assert len(scales) == 4
    assert all(torch.equal(decode.state_dict[name], dynamic.state_dict[name]) for name in scales)
