"""All 30 layers of SmolLM2 from a stored cache: the text, the codes and the logits of the fake-quant model.

In float32 a value next to a tie between two codes may go the other way where a sum is taken in another order, and the
layers behind carry it on. So float32 is compared bit for bit with the same steps over a cache of floats, and the model
without a cache, which adds in another order, in float64.
"""

from functools import cache
from typing import Any, NamedTuple

import generate
import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

import graphquant as gq
from graphquant.data import batches, split_rows, token_rows, topics_text
from graphquant.loops import runnable
from graphquant.models import load_model

pytestmark = pytest.mark.slow

PREFILL, STEPS = 64, 16
PRESETS = ("int8-kv-attn-head", "int4-kproj-v")


class Bench(NamedTuple):
    """The model captured without a cache and with one, and rows of text."""

    tokenizer: Any
    whole: ExportedProgram
    cached: ExportedProgram
    rows: Tensor
    held_out: Tensor


@cache
def bench(dtype: torch.dtype) -> Bench:
    loaded = load_model("smollm2")
    model = loaded.model.to(dtype)
    rows, held_out = split_rows(token_rows(loaded.tokenizer, topics_text(), 256), 2, 1)
    cached = gq.capture(model, cache="static", max_cache_len=PREFILL + STEPS)
    return Bench(loaded.tokenizer, gq.capture(model), cached, rows, held_out)


@cache
def converted(preset: str, dtype: torch.dtype) -> tuple[GraphModule, ExportedProgram, ExportedProgram]:
    """The prepared module, and the program with a cache: its codes stored, and its values."""
    made, config = bench(dtype), gq.preset(preset)
    prepared = gq.prepare(made.whole, config)
    calibration = gq.calibrate(prepared, batches(made.rows), progress=False)
    stored = gq.convert(made.cached, calibration, config, kv_cache="stored")
    return prepared, stored, gq.convert(made.cached, calibration, config)


def decoded(program: ExportedProgram, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The prefill's token and those of the steps after it, and their logits."""
    module = runnable(program)
    return generate.decode(module, module, ids, STEPS + 1)


@torch.no_grad()
def greedy(prepared: GraphModule, ids: Tensor, new_tokens: int) -> Tensor:
    """The fake-quant model's own continuation, the whole text again for every token."""
    gq.set_mode(prepared, "fake_quant")
    for _ in range(new_tokens):
        logits = prepared(input_ids=ids, attention_mask=torch.ones_like(ids))
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids


def test_the_text_is_the_fake_quant_models() -> None:
    prepared, stored, _ = converted("int8-kv-attn-head", torch.float32)
    tokenizer = bench(torch.float32).tokenizer
    ids = torch.tensor([tokenizer(generate.PROMPT).input_ids])
    new, _ = decoded(stored, ids)
    expected = greedy(prepared, ids, 16)
    text = tokenizer.decode(torch.cat([ids, new[:, :16]], 1)[0])
    assert text == tokenizer.decode(expected[0])
    assert len(set(expected[0, ids.shape[1] :].tolist())) > 4


@pytest.mark.parametrize("preset", PRESETS)
def test_codes_in_the_cache_are_values_in_the_cache_bit_for_bit(preset: str) -> None:
    prepared, stored, values = converted(preset, torch.float32)
    ids = bench(torch.float32).held_out[:1, :PREFILL]
    new, logits = decoded(stored, ids)
    assert torch.equal(logits, decoded(values, ids)[1])
    facts = generate.compare(prepared, torch.cat([ids, new], 1), logits)
    assert facts["compared tokens"] == STEPS + 1
    assert facts["top-1 agreement"] >= 0.9
    assert facts["largest difference"] < 0.2  # carried roundings; of another cache it would be about 1
