"""``report``: everything about a converted program in one value, nothing invented."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

import graphquant as gq
from graphquant.errors import CalibrationError, ConvertError
from graphquant.numerics import ErrorSums
from graphquant.records import records
from tests.tiny import TinyAttention, tiny_batch, tiny_batches, tiny_llama


@pytest.fixture(scope="module")
def prepared(tiny_program: ExportedProgram) -> GraphModule:
    module = gq.prepare(tiny_program, gq.preset("int8-kv-attn-head"))
    gq.calibrate(module, tiny_batches(), progress=False)
    return module


@pytest.fixture(scope="module")
def converted(prepared: GraphModule) -> ExportedProgram:
    return gq.convert(prepared)


@pytest.fixture(scope="module")
def measured(prepared: GraphModule) -> gq.Measurement:
    return gq.measure(prepared, tiny_batches())


def test_rows_are_the_program(converted: ExportedProgram, prepared: GraphModule) -> None:
    report, seen = gq.report(converted), gq.calibration_of(prepared)
    assert {row.node for row in report.rows} == {node.name for node, _ in records(converted)}
    assert len(report.rows) == 4
    for row in report.rows:
        scale = converted.state_dict[f"{row.site}_scale"]
        assert (row.scale_min, row.scale_max) == (float(scale.min()), float(scale.max()))
        assert row.scale_min != row.scale_max
        assert row.scale_shape == str(list(scale.shape)) == "[2, 1, 1]"
        assert row.amax == seen[row.site].amax
        assert row.clipped_percent is row.sqnr_db is row.max_abs_error is None


def test_errors_are_the_measurement(converted: ExportedProgram, measured: gq.Measurement) -> None:
    report = gq.report(converted, measured)
    for row in report.rows:
        sums = measured.errors[row.site]
        assert (row.clipped_percent, row.sqnr_db) == (sums.clipped_percent, sums.sqnr_db)
        assert row.max_abs_error == sums.max_abs_error
    assert report.worst is not None
    assert report.worst.sqnr_db == min(sums.sqnr_db for sums in measured.errors.values())


def test_a_program_loaded_in_another_process_reports_the_same(converted: ExportedProgram, tmp_path: Path) -> None:
    torch.export.save(converted, tmp_path / "model.pt2")
    script = (
        "import graphquant as gq, torch, sys\n"
        "text = gq.report(torch.export.load('model.pt2')).to_json()\n"
        "assert 'transformers' not in sys.modules\n"
        "print(text)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == gq.report(converted).to_json() + "\n"


def test_a_prepared_module_reports_its_plan_and_then_what_it_saw(
    tiny_program: ExportedProgram, prepared: GraphModule, converted: ExportedProgram, measured: gq.Measurement
) -> None:
    blank = gq.report(gq.prepare(tiny_program, gq.preset("int8-kv-attn-head")))
    for row in blank.rows:
        assert row.scale_min is row.scale_max is row.amax is row.sqnr_db is None
    assert "scales: not all known, run calibrate(prepared, batches)" in blank.summary()

    full = gq.report(prepared, measured)
    nodes = {row.site: row.node for row in full.rows}
    assert nodes == {record.site: record.node for _, record in records(converted)}
    assert [dataclasses.replace(row, node="") for row in full.rows] == [
        dataclasses.replace(row, node="") for row in gq.report(converted, measured).rows
    ]
    assert not any(line.startswith("scales:") for line in full.summary())


def test_a_dynamic_scale_has_no_range(tiny_program: ExportedProgram) -> None:
    prepared = gq.prepare(tiny_program, gq.preset("int8-kv-token"))
    assert not any(line.startswith("scales:") for line in gq.report(prepared).summary())
    gq.calibrate(prepared, tiny_batches(), progress=False)
    program = gq.convert(prepared)
    for row in gq.report(program, gq.measure(program, tiny_batches())).rows:
        assert row.scale_shape == "[B, 2, S, 1]"
        assert (row.strategy, row.dtype, row.observer) == ("token", "int8 sym", "dynamic")
        assert row.scale_min is row.scale_max is None
        assert row.amax is not None
        assert row.sqnr_db is not None


def test_one_row_a_tensor_with_all_its_sites_and_widths(tiny_program: ExportedProgram) -> None:
    """The input of q_proj, k_proj and v_proj is one tensor; a v_proj output in 4 bits beside it."""
    scheme = gq.QuantizationScheme(
        targets=("role:q_proj", "role:k_proj", "role:v_proj"), input_activations=gq.QuantizationArgs(type="float")
    )
    values = gq.QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=8)
    groups = {
        "inputs": scheme,
        "values": gq.QuantizationScheme(targets=("role:attention",), value_states=values),
    }
    prepared = gq.prepare(tiny_program, gq.QuantizationConfig(config_groups=groups, ignore=("re:.*layers.1.*",)))
    gq.calibrate(prepared, tiny_batches(), progress=False)
    report = gq.report(gq.convert(prepared))
    inputs, states = report.rows
    assert inputs.site.endswith("0.self_attn.q_proj.input")
    assert [site.rsplit(".", 2)[1] for site in inputs.also] == ["k_proj", "v_proj"]
    assert inputs.cells()["site"] == f"{inputs.site} (+2)"
    assert (states.dtype, states.strategy, states.also) == ("int4 asym", "group(8)", ())
    assert report.bits == {4: 1, 8: 1}
    assert report.coverage == {"tensors": 2, "sites": 4, "found": 18, "ignored": 4, "near_misses": 0}


def test_near_misses_of_a_prepared_module_come_with_their_reasons() -> None:
    x = torch.randn(2, 5, 8)
    prepared = gq.prepare(gq.capture(TinyAttention(), {"x": x}), gq.preset("int8-kv-tensor"))
    report = gq.report(prepared)
    (miss,) = report.near_misses
    assert miss.node == "softmax"
    assert f"near miss: attention core, node softmax: {miss.reason}" in report.summary()
    assert report.to_dict()["near_misses"][0]["reason"] == miss.reason
    gq.calibrate(prepared, [{"x": x}], progress=False)
    summary = gq.report(gq.convert(prepared)).summary()
    assert "coverage: 2 of 9 sites found are quantized, 0 ignored, 1 near misses" in summary


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_program_lowered_further_still_reports() -> None:
    batch = {"x": torch.randn(2, 5, 8)}
    prepared = gq.prepare(gq.capture(TinyAttention(), batch), gq.preset("int8-kv-tensor"))
    gq.calibrate(prepared, [batch], progress=False)
    converted = gq.convert(prepared)
    lowered = converted.run_decompositions()
    mine, theirs = gq.report(converted), gq.report(lowered)
    assert {row.node for row in theirs.rows} <= {node.name for node in lowered.graph.nodes}
    assert {row.node for row in theirs.rows}.isdisjoint(row.node for row in mine.rows)
    assert [dataclasses.replace(row, node="") for row in theirs.rows] == [
        dataclasses.replace(row, node="") for row in mine.rows
    ]


def test_sources_that_are_neither_are_refused(tiny_program: ExportedProgram, converted: ExportedProgram) -> None:
    with pytest.raises(ConvertError, match="not made by convert: none of its nodes carries a record"):
        gq.report(tiny_program)
    with pytest.raises(ConvertError, match="a program made by convert or a module made by prepare, found Graph"):
        gq.report(converted.module())


def test_a_measurement_of_something_else_is_refused(
    tiny_program: ExportedProgram, converted: ExportedProgram, measured: gq.Measurement
) -> None:
    key = "model.layers.1.self_attn.key_states"
    fewer = dataclasses.replace(measured, errors={k: v for k, v in measured.errors.items() if k != key})
    with pytest.raises(CalibrationError, match=f"the measurement lacks {key}: measure what is reported on"):
        gq.report(converted, fewer)
    more = dataclasses.replace(measured, errors=measured.errors | {"elsewhere.key_states": ErrorSums()})
    with pytest.raises(CalibrationError, match=r"is of other sites, such as elsewhere\.key_states"):
        gq.report(converted, more)
    other = gq.prepare(tiny_program, gq.preset("int8-kv-tensor"))
    with pytest.raises(CalibrationError, match="is int8 sym tensor here and was measured as int8 sym attn_head:"):
        gq.report(other, measured)


@pytest.fixture(scope="module")
def biased_keys() -> dict[str, Any]:
    """A Llama whose k_proj bias is 100 times larger in two channels, as Qwen2.5's, and programs quantized from it."""
    model = tiny_llama(attention_bias=True, initializer_range=0.3)
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias.data
        bias.fill_(0.3)
        bias[[3, 12]] *= 100
    original, batches = gq.capture(model), [tiny_batch(3, 24)]

    def quantized(role: str, num_bits: int, strategy: str) -> ExportedProgram:
        args = gq.QuantizationArgs(num_bits=num_bits, symmetric=False, strategy=strategy)
        scheme = gq.QuantizationScheme(targets=(f"role:{role}",), output_activations=args)
        prepared = gq.prepare(original, gq.QuantizationConfig(config_groups={role: scheme}))
        gq.calibrate(prepared, batches, progress=False)
        return gq.convert(prepared)

    programs = {
        "keys by tensor": quantized("k_proj", 4, "tensor"),
        "keys by channel": quantized("k_proj", 4, "channel"),
        "values": quantized("v_proj", 3, "tensor"),
    }
    evaluation = gq.evaluate({"original": original} | programs, batches)
    return {name: gq.report(p, gq.measure(p, batches), evaluation) for name, p in programs.items()}


def test_channels_far_from_the_others_need_channel_scales(biased_keys: dict[str, gq.Report]) -> None:
    tensor, channel = biased_keys["keys by tensor"], biased_keys["keys by channel"]
    for coarse, fine in zip(tensor.rows, channel.rows, strict=True):
        assert (coarse.site, coarse.scale_shape, fine.scale_shape) == (fine.site, "[1]", "[16]")
        assert fine.sqnr_db - coarse.sqnr_db > 6  # a bit and more
        assert fine.scale_max > 3 * fine.scale_min
    results = tensor.evaluation.results
    assert results["keys by tensor"].kl > 2 * results["keys by channel"].kl


def test_a_better_sqnr_can_be_the_worse_model(biased_keys: dict[str, gq.Report]) -> None:
    """Why the report has a metric of the logits beside that of the tensors."""
    keys, values = biased_keys["keys by tensor"], biased_keys["values"]
    assert keys.worst.sqnr_db > values.worst.sqnr_db + 3
    results = keys.evaluation.results
    assert results["keys by tensor"].kl > 1.25 * results["values"].kl
    assert any(line.startswith("keys by tensor: perplexity") for line in keys.summary())
