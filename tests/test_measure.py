"""``measure``: one set of figures from a prepared module and from what was converted from it."""

import dataclasses
import io
import math

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.errors import CalibrationError, ConvertError, DataError, NotCalibratedError
from graphquant.loops import runnable
from tests.tiny import TinyAttention, tiny_batch, tiny_batches, tiny_llama

CONFIGS = {
    "int8 sym tensor": (gq.QuantizationArgs(), "states"),
    "int4 asym attn_head_channel": (
        gq.QuantizationArgs(num_bits=4, symmetric=False, strategy="attn_head_channel"),
        "states",
    ),
    "int3 asym group(4)": (gq.QuantizationArgs(num_bits=3, symmetric=False, strategy="group", group_size=4), "outputs"),
    "uint8 sym attn_head": (gq.QuantizationArgs(type="uint", strategy="attn_head"), "outputs"),
    "int8 asym token dynamic": (gq.QuantizationArgs(symmetric=False, strategy="token"), "states"),
    "fp8_e4m3 channel": (gq.QuantizationArgs(type="float", strategy="channel"), "inputs"),
}


def config(args: gq.QuantizationArgs, where: str) -> gq.QuantizationConfig:
    projections = ("role:q_proj", "role:k_proj", "role:v_proj")
    scheme = {
        "states": gq.QuantizationScheme(targets=("role:attention",), input_activations=args),
        "outputs": gq.QuantizationScheme(targets=projections, output_activations=args),
        "inputs": gq.QuantizationScheme(targets=projections, input_activations=args),
    }[where]
    return gq.QuantizationConfig(config_groups={"all": scheme})


def calibrated(program: ExportedProgram, args: gq.QuantizationArgs, where: str) -> torch.fx.GraphModule:
    prepared = gq.prepare(program, config(args, where))
    gq.calibrate(prepared, tiny_batches(), progress=False)
    return prepared


@pytest.fixture(scope="module")
def converted(tiny_program: ExportedProgram) -> ExportedProgram:
    return gq.convert(calibrated(tiny_program, gq.QuantizationArgs(), "states"))


@pytest.mark.parametrize("dialect", ["pt2e", "aten"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_converted_program_measures_as_the_prepared_module_does(
    tiny_program: ExportedProgram, name: str, dialect: str
) -> None:
    prepared = calibrated(tiny_program, *CONFIGS[name])
    expected = gq.measure(prepared, tiny_batches())
    assert gq.measure(gq.convert(prepared, dialect=dialect), tiny_batches()) == expected
    assert set(expected.quantized_as.values()) == {name}
    assert expected.tokens == 3 * 11 - 4 + 7
    assert all(0 < sums.noise < sums.signal for sums in expected.errors.values())


def test_figures_are_those_of_plain_arithmetic() -> None:
    """The first layer's v_proj output, computed by the model itself, quantized by hand, padding left out."""
    model, batch = tiny_llama(), tiny_batch(3, 11, padding=4)
    values = gq.QuantizationScheme(
        targets=("re:.*layers.0.self_attn.v_proj",), output_activations=gq.QuantizationArgs()
    )
    prepared = gq.prepare(model, gq.QuantizationConfig(config_groups={"values": values}))
    gq.calibrate(prepared, [tiny_batch(1, 7, seed=1)], progress=False)
    measured = gq.measure(gq.convert(prepared), [batch])

    layer = model.model.layers[0]

    def v_proj(ids: Tensor) -> Tensor:
        with torch.no_grad():
            return layer.self_attn.v_proj(layer.input_layernorm(model.model.embed_tokens(ids)))

    scale = v_proj(tiny_batch(1, 7, seed=1)["input_ids"]).abs().max() / 127.5
    x = v_proj(batch["input_ids"])[batch["attention_mask"] == 1]
    codes = (x / scale).round()
    error = codes.clamp(-128, 127) * scale - x
    (sums,) = measured.errors.values()
    assert sums.count == x.numel() == 29 * 16
    assert sums.clipped == int(((codes < -128) | (codes > 128)).sum()) > 0
    assert sums.max_abs_error == pytest.approx(float(error.abs().max()))
    assert sums.sqnr_db == pytest.approx(10 * math.log10(float(x.square().sum() / error.square().sum())), abs=1e-3)


def test_padding_does_not_count(converted: ExportedProgram) -> None:
    batch = tiny_batch(3, 11, padding=4)
    other = batch | {"input_ids": torch.where(batch["attention_mask"] == 1, batch["input_ids"], 63)}
    measured = gq.measure(converted, [batch])
    assert gq.measure(converted, [other]) == measured
    assert measured.tokens == 29

    everything = gq.measure(converted, [batch], padding_mask=None)
    assert everything.tokens == 33
    assert gq.measure(converted, [other], padding_mask=None) != everything


def test_batches_add_up_to_their_concatenation(converted: ExportedProgram) -> None:
    """Rows of one length, so that nothing is padded: three of them at once, and one by one."""
    batch = tiny_batch(3, 9)
    single = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(3)]
    once, apart = gq.measure(converted, [batch]), gq.measure(converted, single)
    assert once.tokens == apart.tokens == 27
    for key, sums in once.errors.items():
        assert sums.sqnr_db == pytest.approx(apart.errors[key].sqnr_db, abs=0.1)
        assert sums.count == apart.errors[key].count


def test_a_loaded_program_measures_the_same(converted: ExportedProgram) -> None:
    buffer = io.BytesIO()
    torch.export.save(converted, buffer)
    buffer.seek(0)
    assert gq.measure(torch.export.load(buffer), tiny_batches()) == gq.measure(converted, tiny_batches())


def test_a_cache_that_a_run_writes_to_stays_as_it_is_in_the_program() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(x)
            return self.seen * 1

    program = torch.export.export(Cache(), (torch.ones(2),))
    module = runnable(program)
    assert [module(torch.ones(2)).tolist() for _ in range(2)] == [[1, 1], [2, 2]]
    assert program.state_dict["seen"].tolist() == [0, 0]


def test_measuring_leaves_a_prepared_module_as_it_was(tiny_program: ExportedProgram) -> None:
    prepared = calibrated(tiny_program, gq.QuantizationArgs(), "states")
    batch, original = tiny_batch(3, 11), tiny_program.module()(**tiny_batch(3, 11))
    before = gq.calibration_of(prepared)
    gq.measure(prepared, tiny_batches())
    assert torch.equal(prepared(**batch), original)
    with pytest.raises(DataError, match=r"^batch 1 \(input_ids int64 \[3, 0, 1\], .*\) cannot be run: "):
        gq.measure(prepared, [batch, {name: value[:, :0, None] for name, value in batch.items()}])
    assert torch.equal(prepared(**batch), original)
    assert gq.calibration_of(prepared)["model.layers.0.self_attn.key_states"].tokens == 36 + 2 * 33
    assert before["model.layers.0.self_attn.key_states"].tokens == 36


def test_uncalibrated_is_refused(tiny_program: ExportedProgram) -> None:
    with pytest.raises(NotCalibratedError, match=r"6 sites have observed nothing .*query_states.* run calibrate"):
        gq.measure(gq.prepare(tiny_program, config(gq.QuantizationArgs(), "states")), tiny_batches())


def test_what_was_not_converted_is_refused(tiny_program: ExportedProgram) -> None:
    with pytest.raises(ConvertError, match="not made by convert: none of its nodes carries a record"):
        gq.measure(tiny_program, tiny_batches())
    with pytest.raises(ConvertError, match=r"expected a module made by prepare"):
        gq.measure(tiny_program.module(), tiny_batches())


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_program_rewritten_after_convert_is_refused() -> None:
    batch = {"x": torch.randn(2, 5, 8)}
    prepared = calibrated_on(gq.capture(TinyAttention(), batch), batch)
    converted = gq.convert(prepared)
    assert gq.measure(converted, [batch]) == gq.measure(prepared, [batch])
    with pytest.raises(ConvertError, match=r"rewritten after convert, and attention_0\..*_states is not where it was"):
        gq.measure(converted.run_decompositions(), [batch])


def calibrated_on(program: ExportedProgram, batch: dict[str, Tensor]) -> torch.fx.GraphModule:
    prepared = gq.prepare(program, gq.preset("int8-kv-tensor"))
    gq.calibrate(prepared, [batch], progress=False)
    return prepared


def test_a_lost_scale_is_an_error(converted: ExportedProgram) -> None:
    key = "model.layers.1.self_attn.key_states_scale"
    state = {name: value for name, value in converted.state_dict.items() if name != key}
    lame = dataclasses.make_dataclass("Lame", ["state_dict", "constants"])(state, {})
    from graphquant.measuring import stored

    with pytest.raises(ConvertError, match=f"a record of {key} and no tensor of that name"):
        stored(lame, key)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "measuring: there is not a single batch"),
        (
            [{"input_ids": torch.ones(1, 2, dtype=torch.int64)}],
            "batch 0 has input_ids; the program takes input_ids, at",
        ),
        ([torch.ones(1, 2)], "batch 0 is a Tensor; expected a dict"),
    ],
)
def test_unusable_batches(converted: ExportedProgram, batches: list[dict[str, Tensor]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        gq.measure(converted, batches)


def test_a_mask_that_covers_too_little_is_an_error() -> None:
    from graphquant.numerics import TensorLayout
    from graphquant.passes.modules import kept_rows

    x, layout = torch.zeros(2, 5, 8), TensorLayout("projection", 2, 4)
    assert kept_rows(x, torch.tensor([[1] * 3 + [0] + [1] * 3] * 2), layout, "here").shape == (8, 2, 4)
    with pytest.raises(CalibrationError, match=r"here: a padding mask \[2, 3\] does not cover 5 positions of 2 seq"):
        kept_rows(x, torch.ones(2, 3), layout, "here")


def test_to_dict(converted: ExportedProgram) -> None:
    measured = gq.measure(converted, tiny_batches())
    key = "model.layers.1.self_attn.value_states"
    site = measured.to_dict()["sites"][key]
    assert site["quantized_as"] == "int8 sym tensor"
    assert site["sqnr_db"] == measured.errors[key].sqnr_db
    assert measured.to_dict()["tokens"] == 36
