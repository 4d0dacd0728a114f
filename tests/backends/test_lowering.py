"""Every backend computes what the graph computes, at any batch and sequence, or refuses by name before any work."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_table import Bench, batch, setting
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.backends import BACKENDS, backend
from graphquant.backends.table import capability_rows
from graphquant.errors import BackendMissingError, DataError, LowerError, MismatchError, OutputError, UnsupportedError
from graphquant.numerics import STRATEGIES, TensorLayout
from tests.backends.agreement import disagreement
from tests.tiny import tiny_llama

SIZES = [(rows, length) for rows in (1, 3) for length in (1, 7, 8, 128)]
ALL_LOWERED = [
    ("onnxruntime", "int8 sym"),
    ("onnxruntime", "int4 asym"),
    ("onnxruntime", "fp8 e4m3"),
    ("openvino", "int8 asym"),
    ("inductor", "int8 sym"),
    ("executorch", "int8 asym"),
    ("iree", "int8 sym"),
]
LOWERED = [
    pytest.param(name, form, marks=pytest.mark.skipif(bool(BACKENDS[name].missing()), reason=f"needs {name}"))
    for name, form in ALL_LOWERED
]
"""A part of docs/backends.md, whose table examples/backend_table.py makes; ExecuTorch and IREE where installed."""
LOADERS = {
    "onnxruntime": "import onnxruntime; s = onnxruntime.InferenceSession(path); "
    "out = s.run(None, {k: v.numpy() for k, v in x.items()})[0]",
    "openvino": "import openvino; out = list(openvino.Core().compile_model(path, 'CPU', "
    "{'INFERENCE_PRECISION_HINT': 'f32'})({k: v.numpy() for k, v in x.items()}).values())[0]",
    "inductor": "out = torch._inductor.aoti_load_package(path)(**x).numpy()",
}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "form"), LOWERED)
def test_any_size_gives_the_values_of_the_graph(bench: Bench, lowered: Any, name: str, form: str) -> None:
    artifact, program = lowered(name, form), bench.quantized(form)
    for rows, length in SIZES:
        inputs = batch(rows, length, seed=length)
        assert disagreement(artifact.run(inputs), program, inputs) == {}, (rows, length)


@pytest.mark.parametrize(("name", "form"), LOWERED)
def test_the_summary_is_true(lowered: Any, name: str, form: str) -> None:
    summary = lowered(name, form).summary()
    assert (summary.backend, summary.pairs, summary.integer_kernels) == (name, 12, 0)
    assert summary.dedicated == (6 if name in ("onnxruntime", "executorch") and "fp8" not in form else 0)
    assert "nothing here runs in int8: the pairs round values, and every product is in floating point" in str(summary)
    assert summary.to_dict()["arithmetic"] == 12 - summary.dedicated


@pytest.mark.parametrize("name", LOADERS)
def test_a_saved_artifact_runs_in_a_process_without_graphquant(lowered: Any, name: str, tmp_path: Path) -> None:
    artifact = lowered(name, "int8 asym" if name == "openvino" else "int8 sym")
    path, inputs = tmp_path / f"model{BACKENDS[name].suffix}", batch(2, 9, seed=5)
    artifact.save(path)
    torch.save(inputs, tmp_path / "x.pt")
    script = (
        f"import sys, torch; sys.modules['graphquant'] = None; path = {str(path)!r}\n"
        f"x = torch.load({str(tmp_path / 'x.pt')!r}); {LOADERS[name]}\n"
        f"torch.save(torch.as_tensor(out), {str(tmp_path / 'out.pt')!r})\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    torch.testing.assert_close(torch.load(tmp_path / "out.pt"), artifact.run(inputs)[0])
    with pytest.raises(OutputError, match=r"expected a name that ends in|there is no directory"):
        artifact.save(tmp_path / "none" / "model.txt")


@pytest.mark.skipif(bool(BACKENDS["executorch"].missing()), reason="needs executorch")
def test_executorch_has_a_largest_size(lowered: Any) -> None:
    message = r"an input \[5, 8\] is larger than what memory was planned for, \[4, 512\]: lower again with max_batch=5"
    with pytest.raises(LowerError, match=message):
        lowered("executorch", "int8 asym").run(batch(5, 8))


def test_the_first_site_that_differs_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that rounds down where the program rounds to nearest."""
    real, chosen = BACKENDS["onnxruntime"].compile, BACKENDS["onnxruntime"]

    states = gq.QuantizationArgs()
    scheme = gq.QuantizationScheme(targets=("role:attention",), value_states=states)
    program = gq.convert(bench.program, bench.calibration, gq.QuantizationConfig(config_groups={"v": scheme}))
    monkeypatch.setattr(chosen, "compile", _flooring(real))
    message = r"the first site that differs is model\.layers\.1\.self_attn\.value_states"
    with pytest.raises(MismatchError, match=message):
        gq.lower(program, "onnxruntime", examples=[batch(2, 8)])


def _flooring(real: Any) -> Any:
    def compile(program: ExportedProgram, example: Any, options: Any) -> Any:
        from graphquant.passes.editor import rebuild

        changed = rebuild(program)
        rounds = [node for node in changed.graph.nodes if node.target == torch.ops.aten.round.default]
        rounds[-1].target = torch.ops.aten.floor.default
        return real(changed, example, options)

    return compile


REFUSED = [("openvino", "fp8 e4m3"), ("executorch", "fp8 e5m2"), ("iree", "fp8 e4m3")]


@pytest.mark.parametrize(("name", "form"), REFUSED)
def test_a_setting_that_would_be_wrong_is_refused_by_name(bench: Bench, name: str, form: str) -> None:
    message = (
        rf"^model\.layers\.0\.self_attn\.\S+: backend '{name}' does not take fp8_e\dm\d \w+ at \[B, .*"
        "; the nearest that works is int8"
    )
    with pytest.raises(UnsupportedError, match=message):
        bench.lowered(name, form)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_setting_is_answered(name: str) -> None:
    for layout in (TensorLayout("projection", 2, 8), TensorLayout("states", 2, 8)):
        for strategy in STRATEGIES:
            for form in ("int8 sym", "int4 asym", "fp8 e4m3"):
                answer = BACKENDS[name].capability(setting(strategy, form), layout)
                assert answer.works == (not answer.reason)
                assert bool(answer.reason) == bool(answer.instead)
    assert {row["format"] for row in capability_rows()} == {"int8", "int4", "uint8", "fp8 e4m3", "fp8 e5m2"}


def test_programs_that_no_check_would_save(bench: Bench) -> None:
    program = gq.capture(tiny_llama(), cache="static", max_cache_len=16)
    with pytest.raises(
        UnsupportedError, match=r"'openvino' loses what a program writes to its buffers \(key_cache_0\)"
    ):
        gq.lower(program, "openvino")
    with pytest.raises(
        UnsupportedError, match=r"'onnxruntime' does not take bfloat16 models; it takes float32, float16"
    ):
        gq.lower(gq.capture(tiny_llama().to(torch.bfloat16)), "onnxruntime")
    with pytest.raises(
        LowerError, match=r"unknown backend 'onnxruntim'; did you mean 'onnxruntime'\? \(known: inductor"
    ):
        gq.lower(bench.program, "onnxruntim")
    with pytest.raises(LowerError, match="expected an ExportedProgram, as convert returns it, found LlamaForCausalLM"):
        gq.lower(tiny_llama(), "inductor")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"examples must be dicts of the program's inputs, input_ids, attention_mask"):
        gq.lower(bench.program, "inductor", examples=[{"ids": torch.ones(1, 1)}])


def test_a_missing_package_names_the_extra(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphquant.backends.base.importlib.util.find_spec", lambda name: None)
    message = r"^backend 'iree' needs iree, .* which is not installed: pip install 'graphquant\[iree\]'$"
    with pytest.raises(BackendMissingError, match=message):
        gq.lower(bench.program, "iree")
    assert backend("inductor").missing() == []
