"""The caches of a program: in buffers or in inputs, by name, along their sequence, and none where there is none."""

from functools import cache

import pytest
import torch
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.graph import ops
from graphquant.graph.caches import Cache, find_caches
from tests.passes.modules import Plain, x_of
from tests.passes.stepping import Cached, Growing, positions
from tests.tiny import tiny_llama

LAYERS = {"sdpa": 2, "eager": 1}
FORMS = ("static", "inputs")


@cache
def captured(form: str, implementation: str) -> ExportedProgram:
    """A Llama of two layers of sdpa, or of one that is spelled out."""
    options = {"static": {"cache": "static", "max_cache_len": 8}, "inputs": {"cache": "inputs"}}[form]
    model = tiny_llama(num_hidden_layers=LAYERS[implementation], attn_implementation=implementation)
    return gq.capture(model, **options)


def consistent(program: ExportedProgram, caches: tuple[Cache, ...]) -> None:
    """Names are of nodes that are what a cache says they are."""
    nodes = {node.name: node for node in program.graph.nodes}
    cores = [layer.core for layer in gq.find_attention(program).layers]
    for found in caches:
        place, write, states = nodes[found.place], nodes[found.write], nodes[found.states]
        assert place.op == "placeholder"
        assert place in write.all_input_nodes
        assert ops.written(write) is states or ops.written(write).all_input_nodes[0] is states
        assert nodes[found.reader] in write.users
        assert found.core in cores
        before, now, after = (list(node.meta["val"].shape) for node in (place, states, write))
        assert [len(shape) for shape in (before, now, after)] == [4, 4, 4]
        assert before[found.dim] != now[found.dim]
        assert [before[dim] for dim in (1, 3)] == [now[dim] for dim in (1, 3)] == [after[dim] for dim in (1, 3)]


@pytest.mark.parametrize("implementation", LAYERS)
@pytest.mark.parametrize("form", FORMS)
def test_keys_before_values_layer_by_layer(form: str, implementation: str) -> None:
    program, layers = captured(form, implementation), LAYERS[implementation]
    caches = find_caches(program)
    consistent(program, caches)
    assert [found.operand for found in caches] == ["key", "value"] * layers
    if form == "static":
        targets = [f"{kind}_cache_{layer}" for layer in range(layers) for kind in ("key", "value")]
        assert [found.place for found in caches] == [f"b_{target}" for target in targets]
    else:
        targets = [f"past_key_values_{layer}_{index}" for layer in range(layers) for index in (0, 1)]
        assert [found.place for found in caches] == targets
    assert [found.target for found in caches] == targets
    assert {(found.is_buffer, found.dim) for found in caches} == {(form == "static", 2)}
    cores = [layer.core for layer in gq.find_attention(program).layers]
    assert [found.core for found in caches] == [core for core in cores for _ in (0, 1)]


@pytest.mark.parametrize("form", FORMS)
def test_the_states_are_those_of_the_sites(form: str) -> None:
    program = captured(form, "sdpa")
    sites = gq.find_attention(program)
    for found in find_caches(program):
        layer = next(layer for layer in sites.layers if layer.core == found.core)
        assert found.states == layer.site(f"{found.operand}_states").node


def test_a_program_without_a_cache_has_none(tiny_program: ExportedProgram) -> None:
    assert find_caches(tiny_program) == ()
    assert find_caches(gq.capture(Plain().eval(), example_kwargs={"x": x_of()})) == ()


@pytest.mark.parametrize("write", ["index_copy", "index_put"])
@pytest.mark.parametrize("rows", [1, 2])  # ``cache[:, :, slots] = x`` leaves a batch of 1 out
def test_buffers_of_an_own_module(write: str, rows: int) -> None:
    program = gq.capture(Cached(write=write, rows=rows).eval(), example_kwargs=positions(5, rows=rows))
    caches = find_caches(program)
    consistent(program, caches)
    assert [(found.operand, found.target, found.is_buffer, found.dim) for found in caches] == [
        ("key", "keys", True, 2),
        ("value", "values", True, 2),
    ]
    assert [found.reader for found in caches] == [found.core for found in caches]


def test_inputs_of_an_own_module_and_one_that_two_operands_share() -> None:
    past = {"x": x_of(2, 5), "past_keys": torch.zeros(2, 4, 3, 4), "past_values": torch.zeros(2, 4, 3, 4)}
    for shared, second in ((False, "past_values"), (True, "past_keys")):
        program = gq.capture(Growing(shared).eval(), example_kwargs=past)
        caches = find_caches(program)
        consistent(program, caches)
        assert [(found.operand, found.target, found.place, found.is_buffer) for found in caches] == [
            ("key", "past_keys", "past_keys", False),
            ("value", second, second, False),
        ]


@pytest.mark.parametrize("form", FORMS)
def test_a_decomposed_program_has_the_same_caches(form: str) -> None:
    program = captured(form, "eager")
    decomposed = program.run_decompositions()
    consistent(decomposed, find_caches(decomposed))
    before, after = (
        [(found.operand, found.place, found.target, found.is_buffer, found.dim) for found in find_caches(given)]
        for given in (program, decomposed)
    )
    assert len(after) == 2
    assert after == before
