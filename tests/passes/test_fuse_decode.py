"""fuse_decode: lanes of integers compute what the attention before them computed, in every format that they take."""

from typing import Any

import pytest
import torch

import graphquant as gq
from graphquant.errors import ConvertError
from graphquant.loops import runnable
from tests.passes.stored import both, calls, logits, static
from tests.tiny import tiny_batches, tiny_llama

INTEGERS = [
    {"type": kind, "num_bits": bits, "symmetric": symmetric}
    for kind, bits, symmetric in (
        ("int", 8, True),
        ("int", 8, False),
        ("int", 6, True),
        ("int", 4, True),
        ("int", 4, False),
        ("uint", 8, False),
        ("uint", 3, False),
    )
]


def prepared(
    config: gq.QuantizationConfig, kv_heads: int = 2, length: int = 16, layers: int = 2, head_dim: int = 8
) -> Any:
    return gq.fold_scales(gq.pack_gqa(static(config, kv_heads, length, layers, head_dim, sequence=1)))


@pytest.mark.parametrize("number", INTEGERS, ids=str)
@pytest.mark.parametrize("strategy", ["tensor", "attn_head_channel", "group", "token"])
@pytest.mark.parametrize("head_dim", [8, 128], ids=["tiles", "chunks"])
def test_lanes_compute_the_same(strategy: str, number: dict[str, Any], head_dim: int) -> None:
    config = both(strategy=strategy, **number, **({"group_size": 4} if strategy == "group" else {}))
    # One layer: in a further one a rounding may move a value across a tie of its own scale.
    before = prepared(config, layers=1, head_dim=head_dim)
    after = gq.fuse_decode(before)
    assert calls(after, "scaled_dot_product_attention") == 0
    torch.testing.assert_close(logits(after), logits(before), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("length", [20, 1536])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_heads_and_lengths_in_blocks_and_not(kv_heads: int, length: int, head_dim: int) -> None:
    before = prepared(both(strategy="channel", symmetric=False), kv_heads, length, head_dim=head_dim)
    torch.testing.assert_close(logits(gq.fuse_decode(before)), logits(before), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision(dtype: torch.dtype) -> None:
    """Sums are float32 in lanes, and half at most in sdpa: no further from float32's logits than those are."""
    config = both(strategy="attn_head_channel")
    model = tiny_llama(num_hidden_layers=1).to(dtype)
    seen = gq.calibrate(gq.prepare(gq.capture(model), config), tiny_batches(), progress=False)
    program = gq.capture(model, cache="static", max_cache_len=16, sequence=1)
    before = gq.fold_scales(gq.pack_gqa(gq.convert(program, seen, config, kv_cache="stored")))
    after = gq.fuse_decode(before)
    assert logits(after).dtype == dtype
    assert after.constants["key_cache_0"].dtype == torch.int8
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(logits(after), logits(before), rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("length", [16, 512, 1536])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_a_position_past_the_end_is_an_error(length: int, head_dim: int) -> None:
    before = prepared(both(strategy="channel"), length=length, layers=1, head_dim=head_dim)
    module = runnable(gq.fuse_decode(before))
    one = torch.ones(1, 1, dtype=torch.int64)
    module(input_ids=one, cache_position=torch.tensor([length - 1]))
    for position in (length, length + 1, 2 * length):
        with pytest.raises(IndexError, match="out of"):
            module(input_ids=one, cache_position=torch.tensor([position]))


@pytest.mark.parametrize("length", [1024, 1536])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_every_slot_of_a_cache_in_blocks_is_its_own(length: int, head_dim: int) -> None:
    """Positions at the borders of tiles and blocks, each read by those behind it."""
    before = prepared(both(strategy="channel"), length=length, layers=1, head_dim=head_dim)
    both_modules = [runnable(program) for program in (before, gq.fuse_decode(before))]
    for position in (0, 1, 15, 16, 31, 32, 511, 512, 513, 767, 768, 1023, length - 1):
        token = torch.tensor([[position % 64]])
        expected, found = (module(input_ids=token, cache_position=torch.tensor([position])) for module in both_modules)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("head_dim", "length", "key", "value"),
    [
        (8, 16, (1, 2, 1, 2, 16, 4), (1, 2, 1, 2, 16, 4)),
        (8, 1536, (1, 2, 48, 2, 32, 4), (1, 2, 2, 2, 768, 4)),
        (64, 1024, (1, 2, 32, 16, 32, 4), (1, 2, 1, 1024, 64)),
        (128, 20, (1, 2, 1, 32, 20, 4), (1, 2, 2, 20, 64)),
    ],
)
def test_what_lies_where(head_dim: int, length: int, key: tuple[int, ...], value: tuple[int, ...]) -> None:
    after = gq.fuse_decode(prepared(both(strategy="channel"), length=length, head_dim=head_dim))
    shapes = {name: tuple(value.shape) for name, value in after.constants.items() if "_cache_" in name}
    assert (shapes["key_cache_0"], shapes["value_cache_0"]) == (key, value)
    assert all(after.constants[name].dtype == torch.int8 for name in shapes)
    assert [row.site for row in gq.report(after).rows] == [row.site for row in gq.report(prepared(both())).rows]


@pytest.mark.parametrize(
    "make",
    [
        lambda: gq.fold_scales(gq.pack_gqa(static(both()))),  # more than one token a step
        lambda: gq.pack_gqa(static(both(), sequence=1)),  # a static scale is left
        lambda: prepared(both(type="float")),
    ],
)
def test_what_lanes_do_not_take(make: Any) -> None:
    with pytest.raises(ConvertError, match=r"^no attention reads keys and values of one token a step from integer"):
        gq.fuse_decode(make())
