"""Keys stored before rotary embedding: what lies behind them is computed again for every token, or refused."""

import pytest
import torch
from torch import Tensor, nn

import graphquant as gq
from graphquant.errors import ConvertError
from tests.passes.stored import both, projections

LENGTH, HEADS, DIM = 8, 2, 4


class Rotated(nn.Module):
    """Attention over a cache of rotated keys, its angle from what ``where`` says."""

    def __init__(self, where: str, ring: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.where, self.ring = where, ring
        self.k_proj, self.v_proj, self.q_proj = (nn.Linear(8, HEADS * DIM) for _ in range(3))
        self.register_buffer("keys", torch.zeros(1, HEADS, LENGTH, DIM), persistent=False)
        self.register_buffer("values", torch.zeros(1, HEADS, LENGTH, DIM), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor, position: Tensor, angle: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        turn = {"position": position.float(), "input": angle, "state": self.count + torch.arange(x.shape[1])}[
            self.where
        ]
        k = k * torch.cos(turn.float())[:, None]
        self.count += x.shape[1]
        slots = position % LENGTH if self.ring else position
        keys = self.keys.index_copy_(2, slots, k)
        values = self.values.index_copy_(2, slots, v)
        mask = torch.arange(LENGTH)[None] <= position[:, None]
        return nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def inputs(start: int, length: int) -> dict[str, Tensor]:
    x = torch.randn(1, LENGTH, 8, generator=torch.Generator().manual_seed(1))[:, start : start + length]
    position = torch.arange(start, start + length)
    return {"x": x, "position": position, "angle": position.float()}


def programs(
    where: str, ring: bool = False
) -> tuple[torch.export.ExportedProgram, gq.Calibration, gq.QuantizationConfig]:
    dynamic = {"x": {1: torch.export.Dim.DYNAMIC}, "position": {0: torch.export.Dim.DYNAMIC}}
    program = gq.capture(
        Rotated(where, ring).eval(), inputs(0, 3), dynamic_shapes=dynamic | {"angle": {0: torch.export.Dim.DYNAMIC}}
    )
    config = projections(strategy="channel")
    return program, gq.calibrate(gq.prepare(program, config), [inputs(0, 6)], progress=False), config


def test_every_token_is_turned_by_its_own_position() -> None:
    program, calibration, config = programs("position")
    stored, pairs = (
        gq.convert(program, calibration, config, kv_cache="stored"),
        gq.convert(program, calibration, config),
    )
    one, other = stored.module(), pairs.module()
    for start, length in ((0, 3), (3, 1), (4, 2)):
        torch.testing.assert_close(one(**inputs(start, length)), other(**inputs(start, length)))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("input", r"what follows it reads the input angle, whose values for the earlier tokens are gone"),
        ("state", r"what follows it reads the state b_count, which was another for the earlier tokens"),
    ],
)
def test_what_is_known_of_the_last_token_only(where: str, message: str) -> None:
    with pytest.raises(ConvertError, match=rf"cannot be stored: {message}; quantize the states instead$"):
        gq.convert(*programs(where), kv_cache="stored")


def test_a_ring_of_slots_is_no_position() -> None:
    with pytest.raises(
        ConvertError, match=r"the slots that its cache is written to, are not the positions of an input"
    ):
        gq.convert(*programs("position", ring=True), kv_cache="stored")


class OneTensor(nn.Module):
    """Attention whose keys are its values, each in a cache of its own."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, HEADS, LENGTH, DIM), persistent=False)

    def forward(self, q: Tensor, kv: Tensor, position: Tensor) -> Tensor:
        keys, values = (cache.index_copy_(2, position, kv) for cache in (self.keys, self.values))
        return nn.functional.scaled_dot_product_attention(q, keys, values)


def test_one_tensor_in_two_caches_is_refused() -> None:
    query, states = (torch.randn(1, HEADS, 2, DIM) for _ in range(2))
    example = {"q": query, "kv": states, "position": torch.arange(2)}
    program = gq.capture(OneTensor().eval(), example, dynamic_shapes=dict.fromkeys(example))
    config = both()
    calibration = gq.calibrate(gq.prepare(program, config), [example], progress=False)
    with pytest.raises(ConvertError, match=r"is one tensor in two caches, keys and values: give each its own"):
        gq.convert(program, calibration, config, kv_cache="stored")
