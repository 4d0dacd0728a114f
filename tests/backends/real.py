"""The real SmolLM2, all 30 layers, through a compiler."""

import gc

import graphquant as gq
from graphquant.backends.checking import Reference
from graphquant.data import batches, split_rows, token_rows, topics_text
from graphquant.models import LoadedModel


def runs_the_real_model(smollm2: LoadedModel, name: str) -> None:
    """Lower it with a scale a KV head; lower's own check, and the same next tokens."""
    rows, held_out = split_rows(token_rows(smollm2.tokenizer, topics_text(), 48), 4, 3)
    prepared = gq.prepare(smollm2.model, gq.preset("int8-kv-attn-head"))
    gq.calibrate(prepared, batches(rows), progress=False)
    quantized = gq.convert(prepared)
    examples = [*batches(held_out[:2], 2), *batches(held_out[2:])]
    artifact = gq.lower(quantized, name, examples=examples)
    (expected,) = Reference(quantized).run(examples[0])
    assert (artifact.run(examples[0])[0].argmax(-1) == expected.argmax(-1)).float().mean() >= 0.95
    assert artifact.summary().pairs == 60
    del artifact, prepared, quantized
    gc.collect()  # gigabytes, before the next compiler needs some
