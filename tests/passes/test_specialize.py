"""specialize: a program of any sequence as one of one token a step; sizes become numbers, values stay."""

from typing import Any

import pytest
import torch

import graphquant as gq
from graphquant.errors import ConvertError
from tests.passes.stored import both, captured, in_lanes, logits, projections, static


@pytest.mark.parametrize(
    "config", [projections(num_bits=4, symmetric=False, strategy="channel"), both()], ids=["k_proj", "states"]
)
def test_one_token_a_step_computes_the_same(config: gq.QuantizationConfig) -> None:
    program = static(config)
    one = gq.specialize(program, sequence=1)
    assert torch.equal(logits(one), logits(program))
    assert not [node for node in one.graph.nodes if "sym_size" in str(node.target)]
    assert list(one.example_inputs[1]["input_ids"].shape) == [1, 1]
    with pytest.raises(Exception, match=r"input_ids"):
        logits(one, (2,))


def test_a_specialized_program_is_packed_folded_and_put_into_lanes() -> None:
    one = gq.specialize(static(both(strategy="attn_head")), sequence=1)
    fused = in_lanes(one)
    torch.testing.assert_close(logits(fused), logits(one), rtol=1e-5, atol=1e-6)


def test_past_and_present_stay_dynamic() -> None:
    one = gq.specialize(captured(cache="inputs"), sequence=1)
    module, whole = one.module(), captured(cache="inputs").module()
    for rows, past in ((1, 0), (3, 5)):
        states = torch.randn(rows, 2, past, 8)
        inputs: dict[str, Any] = {
            "input_ids": torch.ones(rows, 1, dtype=torch.int64),
            "attention_mask": torch.ones(rows, past + 1, dtype=torch.int64),
            "past_key_values": ((states, states), (states, states)),
        }
        torch.testing.assert_close(module(**inputs), whole(**inputs))


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (0, r"sequence must be a number of tokens from 1 on, not 0"),
        (True, r"sequence must be a number of tokens from 1 on, not True"),
        (17, r"the program takes 1 to 16 tokens a step, not 17"),
    ],
)
def test_a_sequence_that_is_none(sequence: Any, message: str) -> None:
    with pytest.raises(ConvertError, match=f"^{message}$"):
        gq.specialize(static(both()), sequence=sequence)


def test_a_program_of_a_fixed_length() -> None:
    with pytest.raises(ConvertError, match=r"^the last dim of input_ids is 1; expected a dynamic sequence \[B, S\]"):
        gq.specialize(static(both(), sequence=1), sequence=1)
