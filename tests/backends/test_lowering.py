"""Every backend computes what the graph computes, at any batch and sequence, or refuses by name before any work."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_table import Bench, batch
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.backends import BACKENDS
from graphquant.errors import LowerError, MismatchError, OutputError
from tests.backends.agreement import disagreement
from tests.backends.needs import needs

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
LOWERED = [pytest.param(name, form, marks=needs(name)) for name, form in ALL_LOWERED]
"""A part of docs/backends.md, whose table examples/backend_table.py makes; ExecuTorch and IREE where installed."""
LOADERS = {
    "onnxruntime": "import onnxruntime; s = onnxruntime.InferenceSession(path); "
    "out = s.run(None, {k: v.numpy() for k, v in x.items()})[0]",
    "openvino": "import openvino; out = list(openvino.Core().compile_model(path, 'CPU', "
    "{'INFERENCE_PRECISION_HINT': 'f32'})({k: v.numpy() for k, v in x.items()}).values())[0]",
    "inductor": "out = torch._inductor.aoti_load_package(path)(**x).numpy()",
    "executorch": "import executorch.kernels.quantized; from executorch.runtime import Runtime; "
    "out = Runtime.get().load_program(path).load_method('forward').execute(list(x.values()))[0]",
    "iree": "from iree import runtime; c = runtime.SystemContext(config=runtime.Config('local-task')); "
    "c.add_vm_module(runtime.VmModule.copy_buffer(c.instance, open(path, 'rb').read())); "
    "out = c.modules.module['main'](*(v.numpy() for v in x.values())).to_host().copy()",
}
LOADED = [pytest.param(name, marks=needs(name)) for name in LOADERS]
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


@pytest.mark.parametrize("name", LOADED)
def test_a_saved_artifact_runs_in_a_process_without_graphquant(lowered: Any, name: str, tmp_path: Path) -> None:
    artifact = lowered(name, "int8 asym" if name in ("openvino", "executorch") else "int8 sym")
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


@needs("executorch")
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
