"""Programs whose cache holds codes go through the compilers: step by step they compute what the graph computes."""

import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_unflatten

import graphquant as gq
from graphquant.backends import Lowered
from graphquant.backends.checking import Reference, difference, rms_difference
from graphquant.errors import LowerError, UnsupportedError
from tests.backends.needs import needs
from tests.passes.helpers import args
from tests.passes.stepping import (
    FORMATS,
    TOKENS,
    config,
    empty_past,
    program,
    setting,
    stored,
    takes_past,
)

STEPS, ONES = (5, 1, 1, 1), (1, 1, 1, 1)
Cell = tuple[str, str, str, str]
"""Place, strategy, format of keys and of values."""
HEADS: Cell = ("states", "attn_head", "int8", "int8")
HEADS_OF_4: Cell = ("states", "attn_head", "int8", "int4-asym")
BEFORE_ROPE: Cell = ("outputs", "channel", "int4-asym", "int8")
TOKEN: Cell = ("states", "token", "uint8-asym", "int4-asym")
FP8: Cell = ("states", "attn_head", "e4m3", "e5m2")
COMPILE = {"form": "compile"}


def made(form: str, cell: Cell, passes: str = "") -> ExportedProgram:
    """The stored program, in float32 as compilers take it, after the passes whose letters are given."""
    place, *how = cell
    result = stored(form, place, setting(place, *how), torch.float32)
    if "1" in passes:
        result = gq.specialize(result, sequence=1)
    if "p" in passes:
        result = gq.pack_gqa(result)
    if "s" in passes:
        result = gq.fold_scales(result)
    return gq.fuse_decode(result) if "f" in passes else result


Run = Callable[[Any], Sequence[Tensor]]


def walk(given: ExportedProgram, run: Run, steps: Sequence[int], rows: int = 1) -> Iterator[tuple[Any, Any]]:
    """Every step's inputs, and what ``run`` makes of them; what it gives as present is the past of the next step."""
    past = empty_past(given, rows) if takes_past(given) else None
    start = 0
    for step in steps:
        end = start + step
        batch: dict[str, Any] = {"input_ids": TOKENS[:rows, start:end].contiguous()}
        if past is None:
            batch["cache_position"] = torch.arange(start, end)
        else:
            mask = torch.ones(rows, end, dtype=torch.int64)
            batch |= {"attention_mask": mask, "past_key_values": past}
        found = run(batch)
        yield batch, found
        if past is not None:
            _, past = tree_unflatten(found, given.call_spec.out_spec)
        start = end


def lowered(given: ExportedProgram, backend: str, steps: Sequence[int], rows: int = 1, **options: Any) -> Lowered:
    examples = [batch for batch, _ in walk(given, Reference(given).run, steps, rows)]
    return gq.lower(given, backend, examples=examples, **options)


def check(artifact: Lowered, given: ExportedProgram, steps: Sequence[int], rows: int = 1) -> None:
    """The artifact computes each step's outputs, as codes where they are, and began with an empty cache."""
    if not takes_past(given):
        late = {"input_ids": TOKENS[:rows, :1].contiguous(), "cache_position": torch.tensor([7])}
        fresh = Reference(given)  # what is not written yet are zeros, which one query sees
        fresh.run(late)
        assert fresh.wrong(artifact.run(late), 1e-5, strict=False) == {}
        artifact.reset()
    reference = Reference(given)
    for batch, found in walk(given, artifact.run, steps, rows):
        expected = reference.run(batch)
        assert reference.wrong(found, 1e-5, strict=False) == {}, batch["input_ids"].shape
        assert [one.dtype for one in found] == [one.dtype for one in expected]
    artifact.reset()
    other, last = TOKENS[:rows, : steps[0]].clone(), found[0]
    other[:, 0] = (other[:, 0] + 1) % 64  # tokens of the tiny model
    *_, (_, found) = walk(given, changed(artifact.run, other), steps, rows)
    assert ((found[0] - last).abs().amax((1, 2)) > 1e-4).all()  # the last step sees the first token
    artifact.reset()


def changed(run: Run, first: Tensor) -> Run:
    """``run`` with other tokens in its first step."""
    todo = [first]
    return lambda batch: run(batch | {"input_ids": todo.pop()} if todo else batch)


def counts(artifact: Lowered) -> tuple[int, int, int]:
    summary = artifact.summary()
    return summary.pairs, summary.dedicated, summary.integer_kernels


@pytest.mark.slow
@pytest.mark.parametrize("options", [COMPILE, {}], ids=["compile", "package"])
@pytest.mark.parametrize(
    ("form", "cell", "passes", "steps"),
    [
        ("static", BEFORE_ROPE, "", STEPS),
        ("static", FP8, "ps", STEPS),
        ("one token", HEADS, "", ONES),
        ("one token", HEADS_OF_4, "psf", ONES),
        ("static", TOKEN, "1pf", ONES),
    ],
)
def test_inductor(form: str, cell: Cell, passes: str, steps: Sequence[int], options: dict[str, Any]) -> None:
    given = made(form, cell, passes)
    artifact = lowered(given, "inductor", steps, **options)
    check(artifact, given, steps)
    assert counts(artifact) == (2, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("contract", [True, False])
def test_inductor_contracts_products_and_sums_where_asked(contract: bool, tmp_path: Path) -> None:
    given = made("one token", HEADS_OF_4, "psf")
    artifact = lowered(given, "inductor", ONES, contract=contract)
    check(artifact, given, ONES)
    artifact.save(tmp_path / "package.pt2")
    with zipfile.ZipFile(tmp_path / "package.pt2") as archive:
        kernels = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".kernel.cpp")]
    assert kernels  # each begins with the command that compiled it
    assert all(("-ffp-contract=fast" in text) == contract for text in kernels)


@pytest.mark.slow
def test_inductor_on_rows_that_share_their_positions() -> None:
    given = made("static-3", HEADS, "1psf")
    check(lowered(given, "inductor", ONES, rows=3, **COMPILE), given, ONES, rows=3)


@pytest.mark.slow
@needs("executorch")
@pytest.mark.parametrize(
    ("form", "cell", "passes", "steps"),
    [
        ("static", HEADS_OF_4, "ps", STEPS),
        ("static", BEFORE_ROPE, "", STEPS),
        ("one token", TOKEN, "p", ONES),
        ("static", BEFORE_ROPE, "1", ONES),
    ],
)
def test_executorch(form: str, cell: Cell, passes: str, steps: Sequence[int]) -> None:
    given = made(form, cell, passes)
    artifact = lowered(given, "executorch", steps, max_sequence=8)
    check(artifact, given, steps)
    assert counts(artifact) == (2, 0, 0)
    if steps == STEPS:
        nine = {"input_ids": TOKENS[:1, :9], "cache_position": torch.arange(9)}
        with pytest.raises(LowerError, match=r"\[1, 9\] is larger than what memory was planned for, \[1, 8\]: lower"):
            artifact.run(nine)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [HEADS_OF_4, BEFORE_ROPE, TOKEN], ids=lambda cell: f"{cell[0]} {cell[1]}")
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs(name)) for name in ("onnxruntime", "openvino")])
def test_a_cache_of_inputs(name: str, cell: Cell) -> None:
    given = made("inputs", cell)
    artifact = lowered(given, name, STEPS[:2], rows=2)
    for rows, steps in ((2, STEPS), (1, (3, 1, 2)), (3, (1, 4))):
        check(artifact, given, steps, rows)
    assert counts(artifact) == (2, 0, 0)


@pytest.mark.slow
@needs("onnxruntime")
def test_stored_pairs_are_arithmetic_and_others_are_what_the_backend_has() -> None:
    chosen = config("states", args("channel"), args("channel", **FORMATS["int4-asym"]), query=args("channel"))
    prepared = gq.prepare(program("none"), chosen)
    seen = calibrated(prepared)
    given = gq.pack_gqa(gq.convert(program("inputs", torch.float32), seen, chosen, kv_cache="stored"))
    artifact = lowered(given, "onnxruntime", STEPS[:2], rows=2)
    check(artifact, given, STEPS, rows=2)
    assert counts(artifact) == (3, 1, 0)
    assert "2 of 3 pairs stayed arithmetic" in str(artifact.summary())


def calibrated(prepared: Any) -> gq.Calibration:
    batch = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}
    return gq.calibrate(prepared, [batch], progress=False)


SITE = r"^model\.layers\.0\.self_attn\.(key|value)_states: backend '{}' does not take"


@pytest.mark.parametrize(
    ("name", "form", "cell", "message"),
    [
        (
            "onnxruntime",
            "inputs",
            FP8,
            rf"{SITE} the cache float8_e4m3fn past_key_values_0_0 .*: its Concat takes",
        ),
        ("openvino", "inputs", FP8, rf"{SITE} fp8_e4m3 attn_head at \[B, 2, S, 8\]: its conversion to fp8"),
        ("executorch", "static", FP8, rf"{SITE} fp8_e4m3 attn_head at \[B, 2, S, 8\]: it has no fp8 dtype"),
        ("executorch", "inputs", HEADS, rf'{SITE} the cache int8 .*: its memory is planned ahead.*cache="static"'),
        ("inductor", "inputs", HEADS, rf'{SITE} the cache int8 .*: its package computes other values.*cache="static"'),
        ("iree", "inputs", HEADS_OF_4, rf"{SITE} the cache uint8 past_key_values_0_1 .* to uint8 is not right"),
        ("onnxruntime", "static", HEADS, r"^backend '{}' loses what a program writes to its buffers \(key_cache_0\)"),
        ("openvino", "static", TOKEN, r"^backend '{}' loses what a program writes to its buffers \(key_cache_0"),
    ],
)
def test_what_would_be_wrong_is_refused_by_name(name: str, form: str, cell: Cell, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message.replace("{}", name)):
        gq.lower(made(form, cell), name)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_outputs_of_fp8_are_compared(dtype: torch.dtype) -> None:
    expected = torch.tensor([[1.0, -2.0], [0.5, 4.0]]).to(dtype)
    found = torch.tensor([[1.0, -2.0], [0.5, 3.0]]).to(dtype)
    assert difference(expected, expected) == rms_difference(expected, expected) == 0.0
    assert difference(found, expected) == 0.25
    nan = torch.tensor([[1.0, -2.0], [0.5, float("nan")]]).to(dtype)
    assert difference(nan, expected) == difference(expected, nan) == float("inf")
