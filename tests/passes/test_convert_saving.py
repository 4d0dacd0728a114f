"""A converted program is an ExportedProgram like any other: it saves, loads elsewhere, decomposes, takes any shape."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

import graphquant as gq
from graphquant.plan import make_plan
from graphquant.records import records
from tests.passes.helpers import args, assert_same, both, calibrated, config, run
from tests.passes.modules import Plain, exported, x_of
from tests.tiny import tiny_batch

MIXED = both(
    config("states", args("channel"), args("attn_head", num_bits=4, symmetric=False), args("token")),
    config("outputs", args("group", type="float"), args(), args("attn_head_channel", type="uint")),
    config("inputs", args("tensor", symmetric=False)),
)
"""Every op that either dialect emits."""
BATCH = tiny_batch(3, 9, padding=4)
DIALECTS = ("pt2e", "aten")


@pytest.fixture(scope="module")
def fake_quantized(one_layer: ExportedProgram) -> GraphModule:
    prepared = calibrated(one_layer, MIXED)
    gq.set_mode(prepared, "fake_quant")
    return prepared


@pytest.fixture(scope="module")
def converted(fake_quantized: GraphModule) -> dict[str, ExportedProgram]:
    return {dialect: gq.convert(fake_quantized, dialect=dialect) for dialect in DIALECTS}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_save_and_load_are_bit_equal(converted: dict[str, ExportedProgram], dialect: str) -> None:
    file = io.BytesIO()
    torch.export.save(converted[dialect], file)
    file.seek(0)
    loaded = torch.export.load(file)
    assert_same(loaded.module()(**BATCH), converted[dialect].module()(**BATCH))
    assert [record for _, record in records(loaded)] == [record for _, record in records(converted[dialect])]
    assert len(list(records(loaded))) == 7
    limits = [list(program.range_constraints.values()) for program in (loaded, converted[dialect])]
    assert limits[0] == limits[1]
    assert loaded.module()(**tiny_batch(1, 1)).shape == (1, 1, 64)


ELSEWHERE = """
import json, sys, torch
torch.set_num_threads(1)
batch = torch.load("batch.pt")
assert not hasattr(torch.ops.quantized_decomposed, "quantize_per_tensor"), "torch itself knows these ops"
equal = []
for dialect in ("aten", "pt2e"):
    if dialect == "pt2e":
        import torch.ao.quantization.fx._decomposed
    program = torch.export.load(dialect + ".pt2")
    equal.append(torch.equal(program.module()(**batch), torch.load(dialect + ".pt")))
print(json.dumps({"equal": equal, "graphquant": "graphquant" in sys.modules}))
"""


def test_another_process_needs_torch_alone(converted: dict[str, ExportedProgram], tmp_path: Path) -> None:
    torch.save(BATCH, tmp_path / "batch.pt")
    for dialect, program in converted.items():
        torch.export.save(program, tmp_path / f"{dialect}.pt2")
        torch.save(run(program, BATCH), tmp_path / f"{dialect}.pt")
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"equal": [True, True], "graphquant": False}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (3, 1), (1, 7), (3, 8), (1, 128), (3, 128)])
def test_batch_and_sequence_stay_dynamic(
    fake_quantized: GraphModule, converted: dict[str, ExportedProgram], dialect: str, rows: int, length: int
) -> None:
    batch = tiny_batch(rows, length, padding=length // 2)
    with torch.no_grad():
        assert_same(converted[dialect].module()(**batch), fake_quantized(**batch))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_row_is_the_same_whatever_rows_are_beside_it(converted: dict[str, ExportedProgram], dialect: str) -> None:
    batch = tiny_batch(4, 12)
    together = run(converted[dialect], batch)
    alone = [run(converted[dialect], {name: value[i : i + 1] for name, value in batch.items()}) for i in range(4)]
    # Matrix products of other sizes round otherwise, and a value between two codes may then go to either.
    assert torch.isclose(torch.cat(alone), together, rtol=1e-4, atol=1e-5).float().mean() > 0.9
    torch.testing.assert_close(torch.cat(alone), together, rtol=0.0, atol=0.02)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_converted_program_decomposes(dialect: str) -> None:
    batch = {"x": x_of(3, 5)}
    quantized = gq.convert(calibrated(exported(Plain), MIXED, [batch]), dialect=dialect)
    decomposed = quantized.run_decompositions()
    torch.testing.assert_close(run(decomposed, batch), run(quantized, batch), rtol=1e-5, atol=1e-6)
    kept = {str(node.target) for node in decomposed.graph.nodes if "quantized_decomposed" in str(node.target)}
    assert bool(kept) == (dialect == "pt2e")


def test_a_decomposed_program_is_prepared_and_converted() -> None:
    plain = exported(Plain)
    decomposed = plain.run_decompositions()
    batches = [{"x": x_of(3, 5)}, {"x": x_of(2, 8)}]
    prepared = gq.prepare(decomposed, MIXED)
    for batch in batches:
        assert_same(prepared(**batch), run(decomposed, batch))
    gq.set_mode(prepared, "fake_quant")
    plan = make_plan(gq.find_attention(plain), MIXED)
    for dialect in DIALECTS:
        quantized = gq.convert(prepared, dialect=dialect)
        assert sorted(record.site for _, record in records(quantized)) == sorted(planned.key for planned in plan)
        for batch in batches:
            assert_same(run(quantized, batch), prepared(**batch).detach())


def test_a_loaded_program_is_prepared_and_converted() -> None:
    plain, file = exported(Plain), io.BytesIO()
    torch.export.save(plain, file)
    file.seek(0)
    batch = {"x": x_of(3, 5)}
    first, second = (calibrated(program, MIXED, [batch]) for program in (plain, torch.export.load(file)))
    assert_same(run(gq.convert(second), batch), run(gq.convert(first), batch))
