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
from tests.passes.stored import both, in_lanes
from tests.tiny import tiny_batch, tiny_llama

TOKENS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(3))
PREFILL = 5


@cache
def stored(head_dim: int = 8, length: int = 32, batch: int = 1, seed: int = 0, **given: Any) -> ExportedProgram:
    """Of one model, calibrated on ten tokens that ``seed`` says."""
    config = both(**given)
    model = tiny_llama(num_hidden_layers=2, head_dim=head_dim)
    seen = gq.calibrate(gq.prepare(model, config), [tiny_batch(1, 10, seed=seed)], progress=False)
    program = gq.capture(model, cache="static", max_cache_len=length, batch=batch)
    return gq.convert(program, seen, config, kv_cache="stored")


def lanes(program: ExportedProgram) -> ExportedProgram:
    return in_lanes(gq.specialize(program, sequence=1))


def steps(module: Any, rows: int = 1) -> torch.Tensor:
    """The logits of the tokens behind the prefill."""
    with torch.no_grad():
        made = [
            module(input_ids=TOKENS[:rows, at : at + 1], cache_position=torch.tensor([at]))
            for at in range(PREFILL, TOKENS.shape[1])
        ]
    return torch.cat(made, 1)


def prefilled(program: ExportedProgram, rows: int = 1) -> Any:
    module = runnable(program)
    with torch.no_grad():
        module(input_ids=TOKENS[:rows, :PREFILL], cache_position=torch.arange(PREFILL))
    return module


@pytest.mark.parametrize("given", [{}, {"strategy": "token"}, {"num_bits": 4, "symmetric": False}], ids=str)
@pytest.mark.parametrize(("head_dim", "length", "rows"), [(8, 20, 1), (64, 32, 2), (64, 1536, 1), (96, 37, 2)])
def test_lanes_go_on_from_a_prefill(given: dict[str, Any], head_dim: int, length: int, rows: int) -> None:
    program = stored(head_dim, length, rows, **given)
    source, target = prefilled(program, rows), runnable(lanes(program))
    gq.carry_caches(source, target)
    torch.testing.assert_close(steps(target, rows), steps(source, rows), rtol=1e-4, atol=1e-5)


def test_caches_of_one_shape_and_compiled_modules() -> None:
    program = stored()
    source, target = prefilled(program), runnable(gq.specialize(program, sequence=1))
    gq.carry_caches(torch.compile(source, backend="eager"), torch.compile(target, backend="eager"))
    for name, held in source.named_buffers():
        if "_cache_" in name:
            assert torch.equal(dict(target.named_buffers())[name], held)
            assert held.any()
    torch.testing.assert_close(steps(target), steps(source))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_cache_of_ones_own_naming_and_an_index_put(rows: int) -> None:
    module, batch = Cached(write="index_put", rows=rows), positions(3, rows=rows)
    program = quantizes(module, batch, both())(kv_cache="stored")
    source, target = runnable(program), runnable(program)
    source(**batch)
    gq.carry_caches(source, target)
    assert torch.equal(target.keys, source.keys)
    assert target.keys.any()


ONE = "convert both programs with one calibration and config$"
KEYS = r"^model.layers.0.self_attn.key_states "


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"length": 64}, r"^the cache key_cache_0 int8 \[1, 2, 1, 2, 32, 4\] cannot be filled from key_cache_0 int8 "),
        ({"num_bits": 4}, "cannot be filled from key_cache_0 uint8"),
        ({"batch": 2}, "for the same rows and max_cache_len"),
        ({"head_dim": 64}, "cannot be filled from key_cache_0 int8"),
        ({"seed": 1}, KEYS + "has another scale in the source than in the target: " + ONE),
        (
            {"num_bits": 6},
            KEYS + "is int6 sym tensor in the source and int8 sym tensor in the target: " + ONE,
        ),
        ({"symmetric": False}, KEYS + "is int8 asym tensor in the source and int8 sym tensor in the target: " + ONE),
        (
            {"strategy": "token"},
            "^the source has a cache key_cache_0_scale float32 .*, and the target has none: convert",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_carried(source: dict[str, Any], said: str) -> None:
    refused(runnable(stored(**source)), runnable(lanes(stored())), said)


def test_what_is_no_pair_of_modules_with_caches_of_their_own() -> None:
    program, plain = stored(), gq.capture(tiny_llama())
    target = runnable(lanes(program))
    refused(
        runnable(plain), target, "^the target has a cache key_cache_0 int8 .* and the source has none: convert both"
    )
    refused(target, runnable(program), "cannot be filled from key_cache_0")
    refused(program.module(), gq.specialize(program, sequence=1).module(), r"is one tensor: take runnable\(program\)")
    for wrong in (program, tiny_llama(), None):
        refused(runnable(program), wrong, r"^expected runnable\(program\) or torch.compile's of it, and found a ")
    with pytest.raises(DataError, match=r"^the module to carry to writes to no buffer: capture with cache='static'"):
        gq.carry_caches(target, runnable(plain))


def refused(source: Any, target: Any, said: str) -> None:
    """Nothing of the target is changed before it is refused."""
    held = dict(target.named_buffers()) if isinstance(target, torch.nn.Module) else {}
    before = {name: buffer.clone() for name, buffer in held.items()}
    with pytest.raises(DataError, match=said):
        gq.carry_caches(source, target)
    assert all(torch.equal(buffer, before[name]) for name, buffer in held.items())
