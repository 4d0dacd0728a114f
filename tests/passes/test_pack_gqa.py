"""Packed grouped attention computes what it did before, from K and V that no op expands."""

import functools
import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx import Node

import graphquant as gq
from graphquant.capture.export import export as export_as_it_is
from graphquant.errors import ConvertError
from graphquant.passes.dialects import DIALECTS
from graphquant.passes.pack_gqa import pack_gqa
from graphquant.passes.redialect import redialect
from graphquant.records import records
from tests.passes.helpers import args, assert_same, both, calibrated, config, run
from tests.passes.modules import Base, x_of
from tests.test_capture_caches import ids, stepwise_growing, stepwise_static
from tests.tiny import tiny_batch, tiny_llama

sdpa = F.scaled_dot_product_attention
Change = Callable[[Tensor], Tensor]
Core = Callable[[Tensor, Tensor, Tensor], Tensor]


class Cores(Base):
    """A whole model of 4 query heads of 4 channels, whose cores are given."""

    def __init__(self, cores: dict[str, Core], kv_heads: int) -> None:
        super().__init__(kv_heads)
        self.cores = cores

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        q, k, v = self.qkv(x)
        return {name: core(q, k, v) for name, core in self.cores.items()}


def exported(cores: dict[str, Core], kv_heads: int = 2) -> ExportedProgram:
    # Not by capture, which refuses dropout.
    return export_as_it_is(Cores(cores, kv_heads), (), {"x": x_of()}, {"x": {0: Dim.AUTO, 1: Dim.AUTO}})


def assert_close(left: Any, right: Any) -> None:
    """Equal within 1e-5 of the largest value, one tensor or several by name."""
    lefts, rights = ({"": value} if isinstance(value, Tensor) else value for value in (left, right))
    for name in lefts | rights:
        assert lefts[name].shape == rights[name].shape, name
        assert float((lefts[name] - rights[name]).abs().max()) <= 1e-5 * float(rights[name].abs().max()), name


def cores(program: ExportedProgram) -> list[Node]:
    return [node for node in program.graph.nodes if "scaled_dot_product" in str(node.target)]


def kv_heads(program: ExportedProgram) -> list[tuple[int, ...]]:
    return [tuple(states.meta["val"].shape[1] for states in node.args[1:3]) for node in cores(program)]


def packed(program: ExportedProgram, heads: int = 2) -> ExportedProgram:
    """The program packed, and what must hold: it was not touched, and nothing repeats the heads of keys and values."""
    text = str(program.graph)
    made = pack_gqa(program)
    assert str(program.graph) == text
    assert kv_heads(made) == [(heads, heads)] * len(cores(program))
    assert all(node.kwargs["scale"] is not None and "enable_gqa" not in node.kwargs for node in cores(made))
    targets = {node: str(node.target) for node in made.graph.nodes}  # an expand of 4 dims is a mask's
    assert not [n for n, t in targets.items() if "repeat" in t or ("expand" in t and n.meta["val"].dim() == 5)]
    return made


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    return torch.export.load(io.BytesIO(file.getvalue()))


@pytest.mark.parametrize(("heads", "fixture"), [(2, "tiny_program"), (1, "heads_4_1")])
def test_logits_are_equal(heads: int, fixture: str, request: pytest.FixtureRequest) -> None:
    program = request.getfixturevalue(fixture)
    made = packed(program, heads)
    for rows, length in itertools.product((1, 3, 7), (1, 3, 7)):
        batch = tiny_batch(rows, length, padding=length // 2)
        assert_close(run(made, batch), run(program, batch))
    old = {node.name for node in program.graph.nodes} - {node.name for node in cores(program)}
    new = [node for node in made.graph.nodes if node.name not in old]
    assert len([node for node in new if "expand" in str(node.target)]) == 1  # one mask for all layers
    assert all({"val", "stack_trace", "nn_module_stack"} <= node.meta.keys() for node in new)
    assert made.range_constraints == program.range_constraints
    assert pack_gqa(made) is made


def test_what_has_no_groups_stays_as_it_is(heads_4_4: ExportedProgram) -> None:
    assert pack_gqa(heads_4_4) is heads_4_4
    softmax = exported({"": lambda q, k, v: (q @ k.mT).softmax(-1) @ v}, 4)
    assert pack_gqa(softmax) is softmax


def test_save_and_load_are_bit_equal_and_the_program_decomposes() -> None:
    program, batch = exported({"causal": grouped(is_causal=True), "mask": grouped(mask=bias)}), {"x": x_of(3, 7)}
    made = packed(program)
    assert_same(run(saved_and_loaded(made), batch), run(made, batch))
    assert_same(run(packed(saved_and_loaded(program)), batch), run(made, batch))
    assert_close(run(made.run_decompositions(), batch), run(program, batch))


@pytest.mark.parametrize("cache", ["static", "inputs"])
def test_a_cache_step_by_step(cache: str) -> None:
    stepwise, tokens = (stepwise_static, ids(1)) if cache == "static" else (stepwise_growing, ids(3))
    program = gq.capture(tiny_llama(), cache=cache, max_cache_len=16 if cache == "static" else None)
    made = packed(program)
    with torch.no_grad():
        for steps in ((5, 1, 1, 3), (1, 1, 7), (10,)):
            assert_close(stepwise(made, tokens, steps), stepwise(program, tokens, steps))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_converted_program_keeps_its_pairs(one_layer: ExportedProgram, dialect: str) -> None:
    mix = both(
        config("states", args("tensor"), args("channel"), args("attn_head", num_bits=4, symmetric=False)),
        config("outputs", args("group"), args("token"), args("attn_head_channel", type="uint", symmetric=False)),
    )
    quantized = gq.convert(calibrated(one_layer, mix), dialect=dialect)
    batch, made = tiny_batch(3, 7, padding=2), packed(quantized)
    told = [{n.name: n.meta.get("custom") for n in p.graph.nodes if "quantize" in n.name} for p in (made, quantized)]
    assert told[0] == told[1]
    assert len(list(records(saved_and_loaded(made)))) == 6
    assert_close(run(made, batch), run(quantized, batch))
    for other in DIALECTS.values():
        assert_close(run(redialect(made, other), batch), run(redialect(quantized, other), batch))


def repeated(x: Tensor, times: int = 2) -> Tensor:
    """transformers' ``repeat_kv``: ``[B, K, L, D]`` to ``[B, K·times, L, D]``."""
    batch, heads, length, width = x.shape
    return x[:, :, None, :, :].expand(batch, heads, times, length, width).reshape(batch, -1, length, width)


def bias(q: Tensor) -> Tensor:
    """A bias ``[4, S, S]`` of every head and distance."""
    distance = torch.arange(q.shape[2])[None, :] - torch.arange(q.shape[2])[:, None]
    return distance.to(q.dtype) * torch.tensor([0.5, -0.25, 1.0, 2.0])[:, None, None]


def grouped(repeat: Change = repeated, values: Any = None, mask: Any = None, **options: Any) -> Core:
    """A core of repeated keys and values."""
    last = slice(-1 if options.pop("last", False) else 0, None)
    return lambda q, k, v: sdpa(q[:, :, last], repeat(k), (values or repeat)(v), mask and mask(q), **options)


interleaved = functools.partial(torch.repeat_interleave, repeats=2, dim=1)
SPELLINGS: dict[int, dict[str, Core]] = {
    2: {
        "repeat_kv": grouped(),
        "repeat_interleave": grouped(interleaved),
        "enable_gqa": grouped(lambda k: k, enable_gqa=True),
        "one of each": grouped(interleaved, lambda v: v, enable_gqa=True),
        "clones and slices": grouped(lambda k: k[:, :, None, 0:].expand(-1, -1, 2, -1, -1).clone().flatten(1, 2)),
        "casts": grouped(lambda k: repeated(k.contiguous()).to(k.dtype)),
        "transposed": grouped(lambda k: k.mT[:, :, None].expand(-1, -1, 2, -1, -1).mT.flatten(1, 2)),
        "wide values": grouped(values=lambda v: repeated(torch.cat((v, v.exp()), -1))),
        "scale": grouped(scale=1.5),
        "causal, enable_gqa": grouped(lambda k: k, is_causal=True, enable_gqa=True),
        "causal, more keys": grouped(lambda k: repeated(torch.cat((k, k.exp()), 2)), is_causal=True),
        "causal, one query": grouped(last=True, is_causal=True),
        "bool [S, S]": grouped(mask=lambda q: bias(q)[0] >= -0.5),
        "bool [B, 1, 1, S]": grouped(mask=lambda q: (q.mean((1, 3)) >= q.mean((1, 2, 3))[:, None])[:, None, None]),
        "float [1, 1, S, S]": grouped(mask=lambda q: bias(q)[None, 2:3]),
        "float [4, S, S]": grouped(mask=bias),
        "float [1, 4, S, S]": grouped(mask=lambda q: bias(q)[None]),
        "float [1, 4, 1, S]": grouped(mask=lambda q: bias(q)[None, :, :1]),
        "float [1, 4, 1, S], one query": grouped(mask=lambda q: bias(q)[None, :, :1], last=True),
        "float [1, 1, 1, S], one query": grouped(mask=lambda q: bias(q)[None, :1, :1], last=True),
        "float [S, S], filled": grouped(mask=lambda q: ((made := bias(q)[0].clone()), made[:, 1:].fill_(-2.0))[0]),
        "view": lambda q, k, v: grouped()(q, k, v).transpose(1, 2).view(q.shape[0], q.shape[2], -1),
        "flat view": lambda q, k, v: grouped(lambda x: x, enable_gqa=True)(q.contiguous(), k, v).view(-1, 4),
    },
    1: {
        "expand and repeat": grouped(lambda k: k.expand(-1, 4, -1, -1), lambda v: v.repeat(1, 4, 1, 1)),
        "broadcast": grouped(lambda k: k),
        "repeated twice": grouped(lambda k: repeated(repeated(k)), lambda v: interleaved(repeated(v))),
        "view": lambda q, k, v: sdpa(q, repeated(k, 4), repeated(v, 4)).transpose(1, 2).view(q.shape[0], -1, 16),
    },
}


@pytest.mark.parametrize("heads", SPELLINGS)
def test_every_spelling_is_packed(heads: int) -> None:
    program = exported(SPELLINGS[heads], heads)
    made = packed(program, heads)
    for size in ((1, 1), (3, 7), (7, 3)):
        assert_close(run(made, {"x": x_of(*size)}), run(program, {"x": x_of(*size)}))


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return sdpa(q, interleaved(k), interleaved(v))


UNKNOWN = r"how its KV heads were repeated is not understood$"
TILED = r"\w+ does not put the copies of a KV head side by side$"
WRITTEN = r"mul_\w* overwrites \w+ or its copies after they were made$"
SPELLED = r"it is spelled as aten::%s of %d dims: capture the model with attn_implementation='sdpa'$"
LEFT: dict[str, tuple[Core, str]] = {
    "tile": (grouped(lambda k: k.repeat(1, 2, 1, 1)), TILED),
    "tile by expand": (grouped(lambda k: k[:, None].expand(-1, 2, -1, -1, -1).flatten(1, 2)), TILED),
    "tile of values": (grouped(values=lambda v: v.repeat(1, 2, 1, 1)), TILED),
    "uneven": (grouped(lambda k: k.repeat_interleave(torch.tensor([1, 3]), 1, output_size=4)), TILED),
    "other groups": (grouped(values=lambda v: repeated(v[:, :1], 4)), r"it has 2 heads of keys and 1 of values$"),
    "values of 4": (grouped(values=lambda v: torch.cat((v, v), 1)), r"it has 2 heads of keys and 4 of values$"),
    "dropout": (grouped(dropout_p=1e-9), r"it drops values out \(dropout_p=1e-09\): call model\.eval\(\)"),
    "dropout of copies": (grouped(lambda k: F.dropout(repeated(k), 1e-9)), UNKNOWN),
    "casts": (grouped(lambda k: repeated(k.half()).float()), UNKNOWN),
    "softmax": (lambda q, k, v: (q @ repeated(k).mT).softmax(-1) @ repeated(v), SPELLED % ("softmax", 4)),
    "five dims": (lambda q, k, v: sdpa(q.unflatten(1, (2, 2)), k[:, :, None], v[:, :, None]), SPELLED % (r"\w+", 5)),
    "subgraph": (under_autocast, r"it is in the subgraph of \w+: capture the model without autocast in it$"),
    "overwritten copies": (grouped(lambda k: ((made := interleaved(k)), made[:, :1].mul_(0.5))[0]), WRITTEN),
    "overwritten": (grouped(lambda k: (interleaved(k), k.mul_(0.5))[0]), WRITTEN),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_cannot_be_packed_is_an_error(name: str) -> None:
    core, reason = LEFT[name]
    with pytest.raises(ConvertError, match=rf"^grouped attention \w+ \(\S+\.py:\d+\) cannot be packed: {reason}"):
        pack_gqa(exported({"": core}))


def test_what_cannot_be_packed_is_left_alone_beside_what_can() -> None:
    program = exported({"packed": grouped()} | {name: core for name, (core, _) in LEFT.items()})
    made = pack_gqa(program)
    assert kv_heads(made) == [(2, 2), *kv_heads(program)[1:]]
    assert [node.name for node in cores(made)[1:]] == [node.name for node in cores(program)[1:]]
    assert_close(run(made, {"x": x_of(3, 7)}), run(program, {"x": x_of(3, 7)}))


# Of 2 heads, of 2 rows, and one that fits: torch itself exports no such core.
@pytest.mark.parametrize(("mask", "causal"), [("transpose_1", False), ("unflatten_1", False), ("mul", True)])
def test_a_mask_that_no_core_has_is_an_error(mask: str, causal: bool) -> None:
    program = exported({"": grouped(mask=bias)})
    nodes, (core,) = {node.name: node for node in program.graph.nodes}, cores(program)
    core.args = (*core.args[:3], nodes[mask], 0.0, causal)
    with pytest.raises(ConvertError, match=rf"cannot be packed: queries \[.*\], mask \[.*\], is_causal={causal}$"):
        pack_gqa(program)
