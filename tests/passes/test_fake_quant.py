"""Fake-quant in a prepared module: the arithmetic of ``numerics`` at the site, and gradients straight through."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

import graphquant as gq
from graphquant.errors import ConvertError, NotCalibratedError
from graphquant.numerics import dynamic_qparams, fake_quantize, qparams_from_range
from graphquant.passes.prepared import fake_quants, origin_of
from graphquant.plan import PlannedSite
from tests.numerics.sites import Site
from tests.passes.helpers import FORMATS, PLACES, args, assert_same, both, calibrated, config, run
from tests.tiny import tiny_batch

BATCH = tiny_batch(3, 9, padding=4)
ALL_STATES = both(config("states", args("channel", num_bits=4)), config("outputs", args("attn_head")))


def by_hand(planned: PlannedSite, x: Tensor, mask: Tensor) -> Tensor:
    """Fake-quantize a site's tensor with the range of its own tokens, each scale's values gathered one by one."""
    layout, arguments = planned.layout, planned.args
    if arguments.dynamic:
        return fake_quantize(x, *dynamic_qparams(x, arguments.dtype, arguments.symmetric), arguments.dtype)
    rows = layout.rows(x, mask.bool())
    low, high = rows.amin(0), rows.amax(0)
    owner = Site(layout, arguments.strategy, arguments.group_size).owner
    members: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for head in range(layout.heads):
        for channel in range(layout.head_dim):
            members.setdefault(owner(head, channel), []).append((head, channel))
    for places in members.values():
        heads, channels = map(list, zip(*places, strict=True))
        low[heads, channels] = low[heads, channels].amin()
        high[heads, channels] = high[heads, channels].amax()
    scale, zero_point = qparams_from_range(low, high, arguments.dtype, arguments.symmetric)
    shape = (layout.heads, 1, layout.head_dim) if layout.kind == "states" else (-1,)
    return fake_quantize(x, scale.view(shape), zero_point.view(shape), arguments.dtype)


@pytest.mark.parametrize("numbers", ["int4-asym", "uint8-sym", "e4m3"])
@pytest.mark.parametrize(("where", "strategy"), PLACES)
def test_values_are_those_of_the_arithmetic_at_the_site(
    one_layer: ExportedProgram, where: str, strategy: str, numbers: str
) -> None:
    prepared = calibrated(one_layer, config(where, args(strategy, **FORMATS[numbers])), [BATCH])
    gq.set_mode(prepared, "fake_quant")

    def at(planned: PlannedSite) -> Callable[[Tensor], Tensor]:
        return lambda x: by_hand(planned, x, BATCH["attention_mask"])

    expected = run(one_layer, BATCH, {planned.site.node: at(planned) for planned in origin_of(prepared).plan})
    assert_same(prepared(**BATCH).detach(), expected)
    assert not torch.equal(expected, run(one_layer, BATCH))


def test_it_stays_what_it_was_until_the_mode_is_set_anew(one_layer: ExportedProgram) -> None:
    prepared = calibrated(one_layer, ALL_STATES, [BATCH])
    gq.set_mode(prepared, "fake_quant")
    before = prepared(**BATCH)
    other = tiny_batch(2, 12, seed=5)
    gq.calibrate(prepared, [other], progress=False)  # switches to observing
    assert torch.equal(prepared(**BATCH), run(one_layer, BATCH))
    gq.set_mode(prepared, "fake_quant")
    assert not torch.equal(prepared(**BATCH), before)
    together = calibrated(one_layer, ALL_STATES, [BATCH, BATCH, other])
    gq.set_mode(together, "fake_quant")
    assert torch.equal(prepared(**BATCH), together(**BATCH))


def test_a_mode_needs_a_name_a_prepared_module_and_statistics(one_layer: ExportedProgram) -> None:
    prepared = gq.prepare(one_layer, config("outputs", args()))
    some = r"^3 sites have observed nothing \(model\.layers\.0\.self_attn\.q_proj\.output, .*\): run calibrate\("
    with pytest.raises(NotCalibratedError, match=some):
        gq.set_mode(prepared, "fake_quant")
    assert torch.equal(prepared(**BATCH), run(one_layer, BATCH))  # and is still observing
    assert gq.calibration_of(prepared).entries[0].tokens == int(BATCH["attention_mask"].sum())
    with pytest.raises(ConvertError, match=r"^unknown mode 'fakequant'; there are observe, fake_quant, off$"):
        gq.set_mode(prepared, "fakequant")  # type: ignore[arg-type]
    with pytest.raises(ConvertError, match=r"made by prepare\(model, config\), found Linear without its plan"):
        gq.set_mode(torch.nn.Linear(1, 1), "off")


def test_dynamic_sites_need_no_statistics(one_layer: ExportedProgram) -> None:
    prepared = gq.prepare(one_layer, config("states", args("token")))
    gq.set_mode(prepared, "fake_quant")
    assert not torch.equal(prepared(**BATCH), run(one_layer, BATCH))


def test_scales_are_nan_until_they_are_known(one_layer: ExportedProgram) -> None:
    prepared = gq.prepare(one_layer, ALL_STATES)
    assert all(module.get_buffer("scale").isnan().all() for module in fake_quants(prepared))


def next_token_loss(module: GraphModule, batch: dict[str, Tensor]) -> Tensor:
    logits = module(**batch)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def trained(prepared: GraphModule, steps: int = 3) -> tuple[GraphModule, list[float]]:
    """A copy of a prepared module after some steps of quantization-aware training, and its losses."""
    module = copy.deepcopy(prepared)
    gq.set_mode(module, "fake_quant")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        loss = next_token_loss(module, BATCH)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return module, losses


def test_gradients_reach_every_parameter(one_layer: ExportedProgram) -> None:
    prepared = copy.deepcopy(calibrated(one_layer, ALL_STATES, [BATCH]))
    gq.set_mode(prepared, "fake_quant")
    next_token_loss(prepared, BATCH).backward()
    parameters = dict(prepared.named_parameters())
    assert "model.layers.0.self_attn.k_proj.weight" in parameters
    assert [name for name, p in parameters.items() if p.grad is None or not p.grad.isfinite().all()] == []
    assert [name for name, p in parameters.items() if not p.grad.any()] == []


def test_gradients_are_those_of_the_values_that_are_not_clipped(one_layer: ExportedProgram) -> None:
    prepared = copy.deepcopy(calibrated(one_layer, config("outputs", args()), [BATCH]))
    plain = gq.prepare(one_layer, config("outputs", args()))
    gq.set_mode(prepared, "fake_quant")
    (module,) = [m for m in fake_quants(prepared) if m.planned.site.role == "v_proj.output"]
    module.set_qparams(torch.tensor([1e-6]), torch.tensor([0]))  # everything is clipped
    next_token_loss(prepared, BATCH).backward()
    next_token_loss(plain, BATCH).backward()
    weight = "model.layers.0.self_attn.v_proj.weight"
    assert not prepared.get_parameter(weight).grad.any()  # type: ignore[union-attr]
    assert plain.get_parameter(weight).grad.any()  # type: ignore[union-attr]


def test_training_learns_and_convert_takes_the_trained_weights(one_layer: ExportedProgram) -> None:
    weights = {name: value.clone() for name, value in one_layer.state_dict.items()}
    prepared = calibrated(one_layer, ALL_STATES, [BATCH])
    module, losses = trained(prepared)
    assert losses[0] > losses[1] > losses[2]
    for dialect in ("pt2e", "aten"):
        quantized = gq.convert(module, dialect=dialect)
        assert_same(run(quantized, BATCH), module(**BATCH).detach())
        for name, value in module.named_parameters():
            assert torch.equal(quantized.state_dict[name], value)
            assert not torch.equal(value, weights[name])
            assert isinstance(quantized.state_dict[name], torch.nn.Parameter)
    assert all(torch.equal(value, weights[name]) for name, value in one_layer.state_dict.items())


def test_untrained_weights_are_the_programs_own_tensors(one_layer: ExportedProgram) -> None:
    quantized = gq.convert(calibrated(one_layer, ALL_STATES, [BATCH]))
    own: dict[str, Any] = one_layer.state_dict
    assert all(quantized.state_dict[name] is value for name, value in own.items())
