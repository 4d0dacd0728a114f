"""The tables that people read: golden text of one layer and of its near misses. Their source lines are this file's."""

import torch.nn.functional as F
from torch import Tensor, nn

from graphquant.graph import find_attention
from tests.graph.modules import export


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.adapter = nn.Linear(16, 8)

    def forward(self, x: Tensor, adapted: bool = False) -> Tensor:
        keys = self.k_proj(x) + self.adapter(x) if adapted else self.k_proj(x)
        q = self.q_proj(x).unflatten(-1, (4, 4)).transpose(1, 2)
        k = keys.unflatten(-1, (2, 4)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class Layer(nn.Module):
    def __init__(self, adapted: bool) -> None:
        super().__init__()
        self.attn, self.adapted = SelfAttention(), adapted

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, self.adapted)


MATCHED = """\
  layer  site                module                node         dims          source
-------  ------------------  --------------------  -----------  ------------  -----------------
      0  attn.q_proj.input   attn.q_proj (Linear)  x            [B, S, 16]
      0  attn.k_proj.input   attn.k_proj (Linear)  x            [B, S, 16]
      0  attn.v_proj.input   attn.v_proj (Linear)  x            [B, S, 16]
      0  attn.q_proj.output  attn.q_proj (Linear)  linear_1     [B, S, 16]    test_tables.py:18
      0  attn.k_proj.output  attn.k_proj (Linear)  linear       [B, S, 8]     test_tables.py:17
      0  attn.v_proj.output  attn.v_proj (Linear)  linear_2     [B, S, 8]     test_tables.py:20
      0  attn.query_states   attn (SelfAttention)  transpose    [B, 4, S, 4]  test_tables.py:18
      0  attn.key_states     attn (SelfAttention)  transpose_1  [B, 2, S, 4]  test_tables.py:19
      0  attn.value_states   attn (SelfAttention)  transpose_2  [B, 2, S, 4]  test_tables.py:20

1 attention layers, 9 sites, 0 near misses
"""

ADAPTED = """\
  layer  site                module                node         dims          source
-------  ------------------  --------------------  -----------  ------------  -----------------
      0  attn.q_proj.input   attn.q_proj (Linear)  x            [B, S, 16]
      0  attn.v_proj.input   attn.v_proj (Linear)  x            [B, S, 16]
      0  attn.q_proj.output  attn.q_proj (Linear)  linear_2     [B, S, 16]    test_tables.py:18
      0  attn.v_proj.output  attn.v_proj (Linear)  linear_3     [B, S, 8]     test_tables.py:20
      0  attn.query_states   attn (SelfAttention)  transpose    [B, 4, S, 4]  test_tables.py:18
      0  attn.key_states     attn (SelfAttention)  transpose_1  [B, 2, S, 4]  test_tables.py:19
      0  attn.value_states   attn (SelfAttention)  transpose_2  [B, 2, S, 4]  test_tables.py:20

1 attention layers, 7 sites, 1 near misses

near miss    module    node         reason                                                            source
-----------  --------  -----------  ----------------------------------------------------------------  -----------------
k_proj       attn      transpose_1  transpose_1 is fed by 2 linears (linear, linear_1); expected one  test_tables.py:19
"""


def text(adapted: bool) -> str:
    return "\n".join(line.rstrip() for line in str(find_attention(export(Layer(adapted)))).splitlines()) + "\n"


def test_one_layer() -> None:
    assert text(adapted=False) == MATCHED
    assert len(MATCHED.splitlines()) <= 40


def test_near_misses_follow() -> None:
    assert text(adapted=True) == ADAPTED


def test_other_formats() -> None:
    table = find_attention(export(Layer(adapted=True))).table("github")
    assert "|   layer | site " in table
    assert "| k_proj " in table
