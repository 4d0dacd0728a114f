"""The real SmolLM2, all 30 layers, through every compiler."""

import pytest
import torch

import graphquant as gq
from graphquant.backends import BACKENDS
from graphquant.backends.checking import Reference
from graphquant.data import batches, split_rows, token_rows, topics_text
from graphquant.models import LoadedModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def quantized(smollm2: LoadedModel) -> torch.export.ExportedProgram:
    rows, _ = split_rows(token_rows(smollm2.tokenizer, topics_text(), 64), 4, 1)
    prepared = gq.prepare(smollm2.model, gq.preset("int8-kv-attn-head"))
    gq.calibrate(prepared, batches(rows), progress=False)
    return gq.convert(prepared)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(bool(chosen.missing()), reason=f"needs {name}"))
        for name, chosen in BACKENDS.items()
    ],
)
def test_every_compiler_runs_the_real_model(
    smollm2: LoadedModel, quantized: torch.export.ExportedProgram, name: str
) -> None:
    _, held_out = split_rows(token_rows(smollm2.tokenizer, topics_text(), 48), 1, 3)
    examples = [*batches(held_out[:2], 2), *batches(held_out[2:])]
    artifact = gq.lower(quantized, name, examples=examples)
    (expected,) = Reference(quantized).run(examples[0])
    assert (artifact.run(examples[0])[0].argmax(-1) == expected.argmax(-1)).float().mean() >= 0.95
    assert artifact.summary().pairs == 60
