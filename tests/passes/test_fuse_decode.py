"""fuse_decode: lanes of integers compute what the attention before them computed, in every format that they take."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import graphquant as gq
from graphquant.errors import ConvertError
from graphquant.loops import runnable
from tests.passes.modules import x_of
from tests.passes.stepping import Cached, quantizes
from tests.passes.stored import both, calls, logits, projections, static
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


class Masked(Cached):
    """A ``Cached`` that is given its mask."""

    def forward(self, x: torch.Tensor, position: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        q, k, v = self.qkv(x)
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        return self.join(F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask))


def keys_alone() -> gq.QuantizationConfig:
    scheme = gq.QuantizationScheme(targets=("role:attention",), key_states=gq.QuantizationArgs())
    return gq.QuantizationConfig(config_groups={"k": scheme})


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
    for position in (length, length + 1, 2 * length, -1):
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
    rows = gq.report(after).rows
    assert [row.site for row in rows] == [row.site for row in gq.report(prepared(both())).rows]
    assert [row.stored for row in rows[:2]] == [f"int8 key_cache_0 {list(key)}", f"int8 value_cache_0 {list(value)}"]


def own(rows: int) -> Any:
    """An own attention of one token a step with a mask as an input, stored, packed and folded."""
    chosen = both(strategy="channel", type="uint", symmetric=False)
    batch = {**one_token(rows), "mask": torch.ones(rows, 1, 1, Masked.length, dtype=torch.bool)}
    stored = quantizes(Masked(rows=rows), batch, chosen)(kv_cache="stored")
    return gq.fold_scales(gq.pack_gqa(stored))


def one_token(rows: int) -> dict[str, torch.Tensor]:
    return {"x": x_of(rows, 1), "position": torch.tensor([0])}


def test_a_row_that_the_mask_hides_is_zero() -> None:
    before = own(rows=2)
    mask = torch.ones(2, 1, 1, Masked.length, dtype=torch.bool)
    mask[1], mask[0, ..., 1:] = False, False
    expected, found = (runnable(program)(**one_token(2), mask=mask) for program in (before, gq.fuse_decode(before)))
    assert not found.isnan().any()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: gq.fold_scales(gq.pack_gqa(static(both()))), "it takes more than one token a step: specialize"),
        (lambda: gq.pack_gqa(static(both(), sequence=1)), "layers.0.self_attn.key_states has a scale that is not fold"),
        (lambda: prepared(both(type="float")), "model.layers.0.self_attn.key_states is fp8; expected integers"),
        (lambda: prepared(both(), head_dim=6), "has 6 bytes a token and head in its cache; expected a multiple of 4"),
        (lambda: prepared(both(num_bits=4), head_dim=12), "has 6 bytes a token and head in its cache"),
        (lambda: static(both(), sequence=1), r"^no attention reads keys and values from a cache of codes without rep"),
        (lambda: static(projections(strategy="channel"), kv_heads=4), "^no attention reads keys and values from a cac"),
        (
            lambda: gq.fold_scales(gq.pack_gqa(static(keys_alone(), sequence=1))),
            "beside model.layers.0.self_attn.key_states its values are not stored as states .*: store both so",
        ),
    ],
)
def test_what_lanes_do_not_take(make: Any, said: str) -> None:
    with pytest.raises(ConvertError, match=said):
        gq.fuse_decode(make())


def test_an_attention_over_floats_stays_as_it_was() -> None:
    first = gq.QuantizationConfig.from_dict(both().to_dict() | {"ignore": ["re:.*layers.1.*"]})
    before = prepared(first)
    after = gq.fuse_decode(before)
    assert calls(after, "scaled_dot_product_attention") == 1
    assert [after.constants[f"key_cache_{layer}"].dim() for layer in (0, 1)] == [6, 4]
    torch.testing.assert_close(logits(after), logits(before), rtol=1e-5, atol=1e-6)
