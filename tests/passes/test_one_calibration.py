"""One pass over the data answers every later conversion, also from a file: no figure differs from a pass of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

import graphquant as gq
from tests.passes.helpers import FORMATS, STATIC, args, assert_same, both, calibrated, config, run
from tests.tiny import tiny_batch

CALIBRATED_FOR = both(config("states", args()), config("outputs", args()))
BATCH = tiny_batch(2, 6)


@pytest.fixture(scope="module", params=["minmax", "percentile"])
def loaded(one_layer: ExportedProgram, request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a calibration for int8 sym tensor, by min and max or by percentile."""
    path: Path = tmp_path_factory.mktemp("calibration") / request.param
    gq.calibration_of(calibrated(one_layer, of(request.param))).save(path)
    return path


def of(observer: str, strategy: str = "tensor", numbers: str = "int8-sym") -> gq.QuantizationConfig:
    given = args(strategy, observer=observer, **FORMATS[numbers])
    return both(config("states", given), config("outputs", given))


@pytest.mark.parametrize("numbers", ["int4-asym", "e5m2"])
@pytest.mark.parametrize("strategy", STATIC)
def test_other_formats_and_strategies_need_no_data(
    one_layer: ExportedProgram, loaded: Path, strategy: str, numbers: str
) -> None:
    wanted = of(loaded.name, strategy, numbers)
    once = gq.convert(one_layer, gq.Calibration.load(loaded), wanted)
    own = gq.convert(calibrated(one_layer, wanted))
    assert once.state_dict.keys() == own.state_dict.keys()
    for name, value in own.state_dict.items():
        assert torch.equal(once.state_dict[name], value), name


@pytest.mark.parametrize("dialect", ["pt2e", "aten"])
def test_a_program_converts_as_a_prepared_module_does(one_layer: ExportedProgram, loaded: Path, dialect: str) -> None:
    wanted = of(loaded.name, "attn_head", "int4-asym")
    prepared = calibrated(one_layer, of(loaded.name))
    programs = (
        gq.convert(one_layer, gq.Calibration.load(loaded), wanted, dialect=dialect),
        gq.convert(one_layer, gq.calibration_of(prepared), wanted, dialect=dialect),
        gq.convert(prepared, config=wanted, dialect=dialect),
        gq.convert(gq.prepare(one_layer, of("mse")), gq.Calibration.load(loaded), wanted, dialect=dialect),
    )
    first, *others = (run(program, BATCH) for program in programs)
    for other in others:
        assert_same(other, first)
    assert len({str(program) for program in programs}) == 1
