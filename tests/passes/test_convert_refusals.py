"""What ``convert`` refuses, and how it says so: what was expected, what was found, at which site, what to do."""

from typing import Any

import pytest
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.errors import CalibrationError, ConfigError, ConvertError, NotCalibratedError, StrategyError
from tests.passes.helpers import STATIC, args, both, calibrated, config
from tests.tiny import tiny_batches

STATES, OUTPUTS = config("states", args()), config("outputs", args())
ONCE = r"converted before"
KEY = r"model\.layers\.0\.self_attn\.key_states"


@pytest.mark.parametrize("strategy", STATIC)
def test_no_calibration_names_the_sites(tiny_program: ExportedProgram, strategy: str) -> None:
    prepared = gq.prepare(tiny_program, config("states", args(strategy)))
    with pytest.raises(NotCalibratedError) as error:
        gq.convert(prepared)
    attention = "model.layers.0.self_attn"
    assert str(error.value) == (
        f"6 sites have observed nothing ({attention}.query_states, {attention}.key_states, {attention}.value_states "
        "and 3 more): run calibrate(prepared, batches) before this"
    )


def test_an_empty_calibration_given_beside_the_config_is_refused_too(one_layer: ExportedProgram) -> None:
    empty = gq.calibration_of(gq.prepare(one_layer, STATES))
    with pytest.raises(NotCalibratedError, match=r"^3 sites have observed nothing"):
        gq.convert(one_layer, empty, STATES)


@pytest.mark.parametrize("given", [{}, {"calibration": 1}, {"config": 1}], ids=str)
def test_a_program_needs_a_calibration_and_a_config(one_layer: ExportedProgram, given: dict[str, Any]) -> None:
    values = {"calibration": gq.calibration_of(calibrated(one_layer, STATES)), "config": STATES}
    with pytest.raises(ConvertError, match=r"convert\(program, calibration, config\) needs all three"):
        gq.convert(one_layer, **{name: values[name] for name in given})


def test_a_site_without_statistics_is_named_with_its_line(one_layer: ExportedProgram) -> None:
    prepared = calibrated(one_layer, OUTPUTS)
    where = rf"no statistics of {KEY.replace('key', 'query')} \(node \w+, modeling_llama\.py:\d+\); it has 3 sites"
    with pytest.raises(CalibrationError, match=where):
        gq.convert(prepared, config=both(STATES, OUTPUTS))


def test_a_site_without_statistics_may_be_dynamic(one_layer: ExportedProgram) -> None:
    prepared = calibrated(one_layer, OUTPUTS)
    quantized = gq.convert(prepared, config=both(config("states", args("token")), OUTPUTS))
    assert len(gq.report(quantized).rows) == 6


def test_statistics_of_another_head_dim_are_refused(one_layer: ExportedProgram, tiny_program: ExportedProgram) -> None:
    calibration = gq.calibration_of(calibrated(one_layer, STATES))
    ignoring = gq.QuantizationConfig(config_groups=STATES.config_groups, ignore=("model.layers.1.self_attn",))
    found = r"is \[B, 4, S, 8\] here and was calibrated as \[B, 4, S, 16\]: this calibration belongs to another model"
    with pytest.raises(CalibrationError, match=found):
        gq.convert(tiny_program, calibration, ignoring)


@pytest.mark.parametrize("strategy", ["channel", "attn_head", "group"])
def test_an_average_of_another_strategy_is_refused(one_layer: ExportedProgram, strategy: str) -> None:
    prepared = calibrated(one_layer, config("states", args(observer="moving_average")))
    with pytest.raises(CalibrationError, match=rf"here \[1\], and cannot answer strategy '{strategy}' with scales"):
        gq.convert(prepared, config=config("states", args(strategy, observer="moving_average")))


@pytest.mark.parametrize("observer", ["mse", "percentile", "moving_average"])
def test_an_observer_that_needs_more_than_was_kept_is_refused(one_layer: ExportedProgram, observer: str) -> None:
    prepared = calibrated(one_layer, STATES)
    message = rf"calibrated with observer 'minmax', whose statistics cannot answer '{observer}': calibrate with observ"
    with pytest.raises(CalibrationError, match=message):
        gq.convert(prepared, config=config("states", args(observer=observer)))


def test_an_observer_that_kept_more_answers_min_and_max(one_layer: ExportedProgram) -> None:
    first = gq.convert(calibrated(one_layer, config("states", args(observer="mse"))), config=STATES)
    second = gq.convert(calibrated(one_layer, STATES))
    for name, value in second.state_dict.items():
        assert (first.state_dict[name] == value).all()


def test_a_strategy_that_a_site_cannot_take_is_refused(one_layer: ExportedProgram) -> None:
    prepared = calibrated(one_layer, STATES)
    scheme = gq.QuantizationScheme(targets=("role:attention",), input_activations=args("group", group_size=5))
    c = gq.QuantizationConfig(config_groups={"g": scheme})
    with pytest.raises(StrategyError, match=r"group_size must divide the last dim 16 .*use one of 2, 4, 8, 16"):
        gq.convert(prepared, config=c)


@pytest.mark.parametrize("dialect", ["pt2e", "aten"])
@pytest.mark.parametrize("again", [STATES, config("states", args("token")), OUTPUTS], ids=["same", "token", "other"])
def test_a_program_is_converted_once(one_layer: ExportedProgram, again: gq.QuantizationConfig, dialect: str) -> None:
    calibration = gq.calibration_of(calibrated(one_layer, both(STATES, OUTPUTS)))
    quantized = gq.convert(one_layer, calibration, STATES, dialect=dialect)
    with pytest.raises(ConvertError, match=ONCE):
        gq.convert(quantized, calibration, again, dialect=dialect)
    with pytest.raises(ConvertError, match=ONCE):
        gq.prepare(quantized, again)


@pytest.mark.parametrize("source", ["prepared.pt2", None, 3], ids=str)
def test_what_is_no_module_is_refused(source: Any) -> None:
    with pytest.raises(ConvertError, match=rf"made by prepare\(model, config\), found {type(source).__name__}"):
        gq.convert(source)


def test_wrong_types_beside_a_prepared_module_are_refused(one_layer: ExportedProgram) -> None:
    prepared = calibrated(one_layer, STATES)
    wrong: Any = tiny_batches()
    with pytest.raises(ConvertError, match=r"expected a Calibration, found list"):
        gq.convert(prepared, wrong)
    with pytest.raises(ConfigError, match=r"expected a QuantizationConfig, found list"):
        gq.convert(prepared, config=wrong)
