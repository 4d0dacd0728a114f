"""Keys stored before rotary embedding: what lies behind them is computed again for every token, or refused."""

import pytest
import torch
from torch import Tensor, nn

import graphquant as gq
from graphquant.errors import ConvertError
from tests.passes.stored import projections

LENGTH, HEADS, DIM = 8, 2, 4


class Rotated(nn.Module):
    """Attention over a cache of rotated keys, its angle from what ``where`` says."""

    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.where = where
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
        keys = self.keys.index_copy_(2, position, k)
        values = self.values.index_copy_(2, position, v)
        mask = torch.arange(LENGTH)[None] <= position[:, None]
        return nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def inputs(start: int, length: int) -> dict[str, Tensor]:
    x = torch.randn(1, LENGTH, 8, generator=torch.Generator().manual_seed(1))[:, start : start + length]
    position = torch.arange(start, start + length)
    return {"x": x, "position": position, "angle": position.float()}


def programs(where: str) -> tuple[torch.export.ExportedProgram, gq.Calibration, gq.QuantizationConfig]:
    dynamic = {"x": {1: torch.export.Dim.DYNAMIC}, "position": {0: torch.export.Dim.DYNAMIC}}
    program = gq.capture(
        Rotated(where).eval(), inputs(0, 3), dynamic_shapes=dynamic | {"angle": {0: torch.export.Dim.DYNAMIC}}
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
