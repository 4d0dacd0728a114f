"""A prepared module is a plain GraphModule: it copies, pickles, loads, moves, casts and compiles."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

import graphquant as gq
from graphquant.config import KVCacheScheme
from graphquant.errors import ConvertError
from graphquant.passes.prepared import fake_quants, observers, origin_of
from tests.passes.helpers import args, assert_same, both, calibrated, config, run
from tests.passes.modules import Cached, Plain, Wide, export, exported, x_of
from tests.tiny import tiny_batch, tiny_batches

MIXED = both(
    config("states", args("channel"), args("attn_head", num_bits=4, symmetric=False), args("token")),
    config("outputs", args("group", type="float"), args(observer="mse"), args(observer="moving_average")),
)
BATCH = tiny_batch(2, 7, padding=3)


def statistics_of(module: torch.nn.Module) -> dict[str, Tensor]:
    calibration = gq.calibration_of(module)
    return {f"{key}.{name}": value for key in calibration for name, value in calibration[key].state.items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name, value in left.items() if not torch.equal(value, right[name])] == []


def pickled(module: GraphModule) -> GraphModule:
    copied: GraphModule = pickle.loads(pickle.dumps(module))
    return copied


def twice(module: GraphModule) -> GraphModule:
    return copy.deepcopy(pickled(copy.deepcopy(module)))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, twice])
def test_a_copy_does_all_that_the_module_does_and_on_its_own(
    one_layer: ExportedProgram, copied: Callable[[GraphModule], GraphModule]
) -> None:
    prepared = calibrated(one_layer, MIXED)
    other = copied(prepared)
    assert isinstance(other, GraphModule)
    assert_equal(statistics_of(other), statistics_of(prepared))
    assert_same(other(**BATCH), run(one_layer, BATCH))  # observing: now it has seen more
    assert statistics_of(other)["model.layers.0.self_attn.key_states.tokens"] == 36 + 11
    assert statistics_of(prepared)["model.layers.0.self_attn.key_states.tokens"] == 36
    prepared(**BATCH)
    for dialect in ("pt2e", "aten"):
        expected = run(gq.convert(prepared, dialect=dialect), BATCH)
        quantized = gq.convert(other, dialect=dialect)
        assert_same(run(quantized, BATCH), expected)
        assert quantized.module()(**tiny_batch(1, 1)).shape == (1, 1, 64)
    gq.set_mode(other, "fake_quant")
    assert_same(other(**BATCH).detach(), expected)


def test_an_unpickled_module_trains_and_converts() -> None:
    batch = {"x": x_of()}
    module = pickled(calibrated(exported(Plain), MIXED, [batch]))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    gq.set_mode(module, "fake_quant")
    quantized = gq.convert(module)
    assert_same(run(quantized, batch), module(**batch).detach())
    assert all(torch.equal(quantized.state_dict[name], value) for name, value in module.named_parameters())


def test_a_pickle_holds_the_weights_once() -> None:
    prepared = gq.prepare(exported(Wide), config("states", args()))
    weights = sum(value.numel() * value.element_size() for value in prepared.parameters())
    assert weights > 3_000_000
    assert len(pickle.dumps(prepared)) < weights + 500_000


def test_a_state_dict_carries_the_calibration(one_layer: ExportedProgram) -> None:
    prepared = calibrated(one_layer, MIXED)
    gq.set_mode(prepared, "fake_quant")
    file = io.BytesIO()
    torch.save(prepared.state_dict(), file)
    file.seek(0)
    fresh = gq.prepare(one_layer, MIXED)
    fresh.load_state_dict(torch.load(file))
    assert_equal(statistics_of(fresh), statistics_of(prepared))
    gq.set_mode(fresh, "fake_quant")
    assert_same(fresh(**BATCH), prepared(**BATCH))
    assert_same(run(gq.convert(fresh), BATCH), run(gq.convert(prepared), BATCH))


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double", "cpu"])
def test_a_cast_leaves_statistics_and_scales_as_they_are(one_layer: ExportedProgram, cast: str) -> None:
    prepared = calibrated(one_layer, MIXED)
    gq.set_mode(prepared, "fake_quant")
    observers(prepared)[0].get_buffer("max").fill_(1e5)  # infinite in half precision
    before = {k: v.clone() for k, v in prepared.state_dict().items() if k.startswith("graphquant_")}
    assert {value.dtype for value in before.values()} == {torch.float32, torch.int32, torch.int64}
    moved = getattr(copy.deepcopy(prepared), cast)()
    after = {k: v for k, v in moved.state_dict().items() if k.startswith("graphquant_")}
    assert {k: v.dtype for k, v in after.items()} == {k: v.dtype for k, v in before.items()}
    assert_equal(after, before)
    dtypes = {"half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64, "cpu": torch.float32}
    assert {p.dtype for p in moved.parameters()} == {dtypes[cast]}
    assert {p.dtype for p in one_layer.parameters()} == {torch.float32}
    converted = gq.convert(moved)
    assert {converted.state_dict[name].dtype for name in one_layer.state_dict} == {torch.float32}


def test_to_with_a_device_and_dtype(one_layer: ExportedProgram) -> None:
    prepared = gq.prepare(one_layer, MIXED).to("cpu", torch.bfloat16)
    assert {b.dtype for o in observers(prepared) for b in o.buffers()} == {torch.float32, torch.int32, torch.int64}
    assert {b.dtype for f in fake_quants(prepared) for b in f.buffers()} == {torch.float32, torch.int32}


@torch.no_grad()
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_it_gives_the_same_values_and_statistics(backend: str) -> None:
    torch._dynamo.reset()
    program = exported(Plain)
    c = gq.QuantizationConfig(kv_cache_scheme=KVCacheScheme(key=args("channel")))  # one site: it compiles slowly
    plain, prepared = (gq.prepare(program, c) for _ in range(2))
    compiled: Any = torch.compile(prepared, backend=backend, dynamic=True)
    for x in (x_of(2, 5), x_of(3, 8)):
        assert torch.equal(compiled(x=x), plain(x=x))
    assert_equal(statistics_of(prepared), statistics_of(plain))
    assert_equal(statistics_of(compiled), statistics_of(plain))
    for module in (compiled, plain):
        gq.set_mode(module, "fake_quant")
    assert torch.equal(compiled(x=x), plain(x=x))
    assert_same(run(gq.convert(compiled), {"x": x}), plain(x=x))


def test_its_weights_are_the_programs_storage_and_its_buffers_are_not() -> None:
    program = export(Cached(), x=x_of(1, 2), position=torch.arange(2))
    prepared = gq.prepare(program, config("states", args()))
    for name, parameter in prepared.named_parameters():
        assert parameter is not program.state_dict[name]
        assert parameter.data_ptr() == program.state_dict[name].data_ptr()
    for name in ("keys", "values"):
        assert prepared.get_buffer(name).data_ptr() != program.state_dict[name].data_ptr()


def test_a_module_that_was_not_prepared_is_refused(one_layer: ExportedProgram) -> None:
    for module in (one_layer.module(), torch.nn.Linear(1, 1)):
        name = type(module).__name__
        for call in (gq.calibration_of, gq.convert, origin_of, lambda m: gq.calibrate(m, tiny_batches())):
            with pytest.raises(ConvertError, match=f"made by prepare.*found {name} without its plan"):
                call(module)  # type: ignore[operator]
