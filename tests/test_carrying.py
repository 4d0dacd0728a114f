"""carry_caches: a step goes on from what a prefill wrote, whatever shape its own caches have."""

from functools import cache
from typing import Any

import pytest
import torch
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.errors import DataError
from graphquant.loops import runnable
from tests.passes.stepping import Cached, positions, quantizes
from tests.passes.stored import both
from tests.tiny import tiny_batches, tiny_llama

TOKENS = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(3))
PREFILL = 5


@cache
def stored(head_dim: int = 8, length: int = 32, batch: int = 1, **given: Any) -> ExportedProgram:
    config = both(**given)
    model = tiny_llama(num_hidden_layers=2, head_dim=head_dim)
    seen = gq.calibrate(gq.prepare(model, config), tiny_batches(), progress=False)
    program = gq.capture(model, cache="static", max_cache_len=length, batch=batch)
    return gq.convert(program, seen, config, kv_cache="stored")


def lanes(program: ExportedProgram) -> ExportedProgram:
    return gq.fuse_decode(gq.fold_scales(gq.pack_gqa(gq.specialize(program, sequence=1))))


def steps(module: Any) -> torch.Tensor:
    """The logits of the tokens behind the prefill."""
    with torch.no_grad():
        made = [
            module(input_ids=TOKENS[:, at : at + 1], cache_position=torch.tensor([at]))
            for at in range(PREFILL, TOKENS.shape[1])
        ]
    return torch.cat(made, 1)


def prefilled(program: ExportedProgram) -> Any:
    module = runnable(program)
    with torch.no_grad():
        module(input_ids=TOKENS[:, :PREFILL], cache_position=torch.arange(PREFILL))
    return module


@pytest.mark.parametrize("given", [{}, {"strategy": "token"}, {"num_bits": 4, "symmetric": False}], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("length", [20, 32, 1536])
def test_lanes_go_on_from_a_prefill(given: dict[str, Any], head_dim: int, length: int) -> None:
    program = stored(head_dim, length, **given)
    source, target = prefilled(program), runnable(lanes(program))
    gq.carry_caches(source, target)
    torch.testing.assert_close(steps(target), steps(source), rtol=1e-4, atol=1e-5)


def test_caches_of_one_shape_and_compiled_modules() -> None:
    program = stored()
    source, target = prefilled(program), runnable(gq.specialize(program, sequence=1))
    gq.carry_caches(torch.compile(source, backend="eager"), torch.compile(target, backend="eager"))
    for name, held in source.named_buffers():
        if "_cache_" in name:
            assert torch.equal(dict(target.named_buffers())[name], held)
            assert held.any()
    torch.testing.assert_close(steps(target), steps(source))


def test_a_cache_of_ones_own_naming_and_an_index_put() -> None:
    module, batch = Cached(write="index_put", rows=2), positions(3, rows=2)
    program = quantizes(module, batch, both())(kv_cache="stored")
    source, target = runnable(program), runnable(program)
    source(**batch)
    gq.carry_caches(source, target)
    assert torch.equal(target.keys, source.keys)
    assert target.keys.any()


def test_what_cannot_be_carried() -> None:
    target = runnable(lanes(stored()))
    for source, said in (
        (stored(length=64), r"^the cache key_cache_0 int8 \[1, 2, 1, 2, 32, 4\] cannot be filled from one of int8 "),
        (stored(num_bits=4), "cannot be filled from one of uint8"),
        (stored(batch=2), "for the same rows and max_cache_len"),
        (gq.capture(tiny_llama()), "the source has no cache key_cache_0 int8"),
        (lanes(stored(64)), "cannot be filled from one of int8"),
    ):
        before = {name: held.clone() for name, held in target.named_buffers()}
        with pytest.raises(DataError, match=said):
            gq.carry_caches(runnable(source), target)
        assert all(torch.equal(held, before[name]) for name, held in target.named_buffers())
    with pytest.raises(DataError, match="writes to no buffer: capture with cache='static'"):
        gq.carry_caches(target, runnable(gq.capture(tiny_llama())))
    with pytest.raises(DataError, match=r"^expected program.module\(\), and found a LlamaForCausalLM"):
        gq.carry_caches(target, tiny_llama())
