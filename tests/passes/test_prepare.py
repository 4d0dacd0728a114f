"""``prepare`` changes no value, touches nothing that it was given, and puts modules at the planned sites alone."""

import copy

import pytest
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

import graphquant as gq
from graphquant.errors import ConfigError, ConvertError, SelectorError
from graphquant.passes.modules import SiteFakeQuant, SiteObserver
from graphquant.passes.prepared import fake_quants, observers, origin_of
from tests.passes.helpers import PLACES, args, both, call_names, config, run, wiring
from tests.passes.modules import Masked, Plain, export, exported, x_of
from tests.tiny import tiny_batch, tiny_batches, tiny_llama

SHAPES = [(1, 1, 0), (2, 3, 0), (3, 11, 4), (1, 8, 5)]
"""B, S, and tokens of padding in the last sequence."""
EVERYTHING = both(config("states", args()), config("outputs", args("channel")), config("inputs", args("token")))


@pytest.mark.parametrize(("where", "strategy"), PLACES)
def test_no_value_changes_while_observing_and_with_all_switched_off(
    tiny_program: ExportedProgram, where: str, strategy: str
) -> None:
    prepared = gq.prepare(tiny_program, config(where, args(strategy)))
    for batch in (tiny_batch(rows, length, padding) for rows, length, padding in SHAPES):
        expected = run(tiny_program, batch)
        for mode in ("observe", "off"):
            gq.set_mode(prepared, mode)
            assert torch.equal(prepared(**batch), expected)
    assert all(observer.seen_batches == len(SHAPES) for observer in observers(prepared))


def test_switched_off_nothing_is_observed(tiny_program: ExportedProgram) -> None:
    prepared = gq.prepare(tiny_program, EVERYTHING)
    gq.set_mode(prepared, "off")
    prepared(**tiny_batch(2, 5))
    assert {entry.tokens for entry in gq.calibration_of(prepared).entries} == {0}


def test_the_program_is_untouched(one_layer: ExportedProgram) -> None:
    text, ranges = str(one_layer), str(one_layer.range_constraints)
    tensors = {name: (value, value.clone()) for name, value in (one_layer.state_dict | one_layer.constants).items()}
    prepared = gq.prepare(one_layer, EVERYTHING)
    gq.calibrate(prepared, tiny_batches(), progress=False)
    gq.convert(prepared)
    gq.convert(prepared, dialect="aten")
    prepared.half()
    assert (str(one_layer), str(one_layer.range_constraints)) == (text, ranges)
    now = one_layer.state_dict | one_layer.constants
    assert now.keys() == tensors.keys()
    for name, (tensor, value) in tensors.items():
        assert now[name] is tensor
        assert torch.equal(tensor, value)


def test_a_hugging_face_model_is_captured_and_untouched() -> None:
    model = tiny_llama(num_hidden_layers=1)
    cls, text = type(model), str(model)
    states = {name: value.clone() for name, value in model.state_dict().items()}
    settings = copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict()))
    prepared = gq.prepare(model, config("states", args()))
    batch = tiny_batch(2, 5, padding=2)
    with torch.no_grad():
        assert torch.equal(prepared(**batch), model(**batch).logits)
    assert (type(model), str(model)) == (cls, text)
    assert (model.config.to_dict(), model.generation_config.to_dict()) == settings
    assert not model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, states[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("c", [EVERYTHING, config("states", args("group"))], ids=["everything", "states"])
def test_the_planned_sites_have_modules_and_no_other_node_is_different(
    tiny_program: ExportedProgram, c: gq.QuantizationConfig
) -> None:
    prepared = gq.prepare(tiny_program, c)
    assert type(prepared).__mro__[1] is GraphModule
    plan = origin_of(prepared).plan
    placeholders = {spec.target: spec.arg.name for spec in tiny_program.graph_signature.input_specs}
    alias = {node.name: placeholders[node.target] for node in prepared.graph.nodes if node.op == "get_attr"}
    called = [node for node in prepared.graph.nodes if node.op == "call_module"]
    pairs = {
        observer.args[0].name: (observer, fake_quant)
        for observer, fake_quant in zip(called[::2], called[1::2], strict=True)
    }
    assert len(called) == 2 * len(pairs) == 2 * len(plan)
    for planned in plan:
        observer, fake_quant = pairs[planned.site.node]
        assert isinstance(prepared.get_submodule(observer.target), SiteObserver)
        assert isinstance(prepared.get_submodule(fake_quant.target), SiteFakeQuant)
        assert list(observer.users) == [fake_quant]
        assert {node.args[1].target for node in (observer, fake_quant)} == {"attention_mask"}
        alias[fake_quant.name] = planned.site.node
    names = call_names(tiny_program)
    assert [node.name for node in prepared.graph.nodes if node.op == "call_function"] == names
    assert wiring(prepared.graph, names, alias) == wiring(tiny_program.graph, names, {})


@pytest.mark.parametrize("where", ["states", "outputs", "inputs"])
def test_every_value_reader_of_a_site_reads_its_quantized_values(tiny_program: ExportedProgram, where: str) -> None:
    prepared = gq.prepare(tiny_program, config(where, args()))
    nodes = {node.name: node for node in prepared.graph.nodes}
    for planned in origin_of(prepared).plan:
        values = [user for user in nodes[planned.site.node].users if "sym_size" not in user.name]
        assert [user.op for user in values] == ["call_module"]


def test_the_mask_of_minus_infinity_enters_no_observed_value(eager_program: ExportedProgram) -> None:
    masked = [n for n in eager_program.graph.nodes if n.target is torch.ops.aten.softmax.int]
    assert len(masked) == 2  # the attention is spelled out, and its mask is added before the softmax
    prepared = gq.prepare(eager_program, EVERYTHING)
    calibration = gq.calibrate(prepared, tiny_batches(), progress=False)
    assert len(calibration) == 2 * 9
    for entry in calibration.entries:
        assert entry.state["min"].isfinite().all()
        assert entry.state["max"].isfinite().all()
        assert entry.amax < 10.0


def test_sites_of_one_tensor_share_their_modules(tiny_program: ExportedProgram) -> None:
    prepared = gq.prepare(tiny_program, config("inputs", args()))
    assert len(observers(prepared)) == len(fake_quants(prepared)) == 2
    keys = [entry.keys for entry in gq.calibration_of(prepared).entries]
    assert keys == [
        tuple(f"model.layers.{layer}.self_attn.{letter}_proj.input" for letter in "qkv") for layer in range(2)
    ]


@pytest.mark.parametrize("given", [{}, None, "int8-kv-tensor", gq.QuantizationArgs()], ids=str)
def test_anything_but_a_config_is_refused(one_layer: ExportedProgram, given: object) -> None:
    with pytest.raises(ConfigError, match=f"expected a QuantizationConfig, found {type(given).__name__}"):
        gq.prepare(one_layer, given)  # type: ignore[arg-type]


def test_a_prepared_module_is_not_prepared_again(one_layer: ExportedProgram) -> None:
    prepared = gq.prepare(one_layer, gq.preset("int8-kv-tensor"))
    with pytest.raises(ConvertError, match=r"^this module is prepared already: give prepare the model or program"):
        gq.prepare(prepared, gq.preset("int8-kv-tensor"))


def test_a_config_that_selects_nothing_is_refused(one_layer: ExportedProgram) -> None:
    scheme = gq.QuantizationScheme(targets=("re:.*attn_",), input_activations=args())
    with pytest.raises(SelectorError, match=r"selects nothing; there are model\.layers\.\*\.self_attn"):
        gq.prepare(one_layer, gq.QuantizationConfig(config_groups={"g": scheme}))


def test_a_mask_of_three_dims_is_refused_and_can_be_left_out() -> None:
    batch = {"x": x_of(2, 6), "attention_mask": torch.ones(2, 6, 6)}
    program = export(Masked(), **batch)
    c = config("states", args())
    with pytest.raises(ConfigError, match=r"'attention_mask' has 3 dims; expected \[B, T\].*padding_mask=None"):
        gq.prepare(program, c)
    calibration = gq.calibrate(gq.prepare(program, c, padding_mask=None), [batch], progress=False)
    assert {entry.tokens for entry in calibration.entries} == {12}


def test_a_mask_by_another_name_must_be_there(one_layer: ExportedProgram) -> None:
    with pytest.raises(ConfigError, match=r"no input 'mask' that could be the padding mask; it has .*attention_mask"):
        gq.prepare(one_layer, config("states", args()), padding_mask="mask")
    prepared = gq.prepare(exported(Plain), config("states", args()))  # the default name may be missing
    assert not any(len(node.args) > 1 for node in prepared.graph.nodes if node.op == "call_module")
