"""Inductor's two forms, and models in half precision through the backends that take them."""

from pathlib import Path

import pytest
import torch
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.backends import BACKENDS
from graphquant.backends.checking import Reference
from graphquant.errors import LowerError, OutputError
from graphquant.loops import runnable
from graphquant.passes.redialect import redialect
from graphquant.passes.watching import with_outputs
from graphquant.records import records
from tests.backends.agreement import disagreement
from tests.passes.helpers import args, config
from tests.passes.stored import both, in_lanes, static
from tests.tiny import tiny_batch, tiny_batches, tiny_llama

pytestmark = pytest.mark.slow
STATES = config("states", args("token"), args("attn_head"), args("tensor", symmetric=False))


def quantized(dtype: torch.dtype) -> ExportedProgram:
    prepared = gq.prepare(tiny_llama(num_hidden_layers=1).to(dtype), STATES)
    gq.calibrate(prepared, tiny_batches(), progress=False)
    return gq.convert(prepared)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("inductor", torch.bfloat16), ("inductor", torch.float16), ("onnxruntime", torch.float16)],
)
def test_models_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """A fused loop rounds less in between than the graph; but a site's values lie on the grid of its scales."""
    program = quantized(dtype)
    artifact = gq.lower(program, name)
    assert artifact.run(tiny_batch(3, 1))[0].dtype == dtype
    assert artifact.summary().pairs == 3
    key, record = next((node, record) for node, record in records(program) if record.site.endswith("key_states"))
    watched = with_outputs(redialect(program, BACKENDS[name].dialect), [key.name])
    batch = tiny_batch(2, 9)
    found = BACKENDS[name].compile(watched, batch, {}).run(batch)[-1]
    scale = program.state_dict[f"{record.site}_scale"]
    grid = (torch.arange(-128, 128) * scale.flatten()[:, None]).to(dtype)
    for head in range(found.shape[1]):
        assert torch.isin(found[:, head].flatten(), grid[head]).all()
    expected = Reference(watched).run(batch)[-1]
    assert ((found - expected).abs().float() <= 1.1 * scale + 0.01 * expected.abs()).all()


def test_torch_compile_is_a_form_of_inductor(tmp_path: Path) -> None:
    program = quantized(torch.float32)
    artifact = gq.lower(program, "inductor", form="compile")
    for rows, length in ((1, 1), (3, 7)):
        inputs = tiny_batch(rows, length, seed=length)
        assert disagreement(artifact.run(inputs), program, inputs) == {}
    summary = artifact.summary()
    assert (summary.pairs, summary.dedicated, summary.integer_kernels) == (3, 0, 0)
    assert summary.details["C++ kernels, the pairs fused into them"] > 0
    with pytest.raises(OutputError, match=r"torch\.compile leaves no file; lower with form='package'"):
        artifact.save(tmp_path / "model.pt2")


def test_torch_compile_keeps_a_cache_and_forgets_it_when_told(tmp_path: Path) -> None:
    model = tiny_llama(num_hidden_layers=1)
    program = gq.capture(model, cache="static", max_cache_len=8)
    first, second = (
        {"input_ids": torch.full((1, n), n), "cache_position": torch.arange(n) + s} for s, n in ((0, 3), (3, 1))
    )
    artifact = gq.lower(program, "inductor", form="compile", examples=[first, second])
    outputs = [artifact.run(first)[0], artifact.run(second)[0]]
    artifact.reset()
    again = [artifact.run(first)[0], artifact.run(second)[0]]
    torch.testing.assert_close(again, outputs)
    with torch.no_grad():
        whole = model(torch.cat([first["input_ids"], second["input_ids"]], 1)).logits
    torch.testing.assert_close(outputs[1][:, -1], whole[:, -1], rtol=1e-4, atol=1e-5)


def test_a_package_goes_on_from_a_prefill(tmp_path: Path) -> None:
    """As docs/stored-cache.md says it: torch gives the caches to the package by their names."""
    stored = static(both(strategy="attn_head"), layers=1, head_dim=64)
    one = in_lanes(gq.specialize(stored, sequence=1))
    gq.lower(one, "inductor").save(tmp_path / "step.pt2")
    package = torch._inductor.aoti_load_package(str(tmp_path / "step.pt2"))
    prefill, step = runnable(stored), runnable(one)
    ids = tiny_batch(1, 6)["input_ids"]
    with torch.no_grad():
        prefill(input_ids=ids[:, :5], cache_position=torch.arange(5))
        gq.carry_caches(prefill, step)
        held = dict(step.named_buffers())
        caches = {name: held[name] for name in package.get_constant_fqns() if "_cache_" in name}
        assert len(caches) == 2
        package.load_constants(caches, check_full_update=False)
        last = {"input_ids": ids[:, 5:], "cache_position": torch.tensor([5])}
        torch.testing.assert_close(package(**last), prefill(**last), rtol=1e-4, atol=1e-5)


def test_a_form_that_there_is_not() -> None:
    with pytest.raises(LowerError, match="unknown form 'jit' of backend 'inductor'; there are package, compile"):
        gq.lower(quantized(torch.float32), "inductor", form="jit")
