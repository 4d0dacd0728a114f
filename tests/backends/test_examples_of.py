"""What an artifact is checked on where nobody gives examples: every step of a small session, from an empty cache on."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import graphquant as gq
from graphquant.backends import BACKENDS, Lowered, Summary
from graphquant.backends.base import Batch, tensors
from graphquant.backends.examples import examples_of
from graphquant.errors import MismatchError
from graphquant.loops import caller, runnable
from tests.passes.helpers import args
from tests.passes.stepping import config, program, stored
from tests.passes.stored import both, in_lanes, static
from tests.tiny import VOCABULARY, tiny_llama

FOUR, ONES = [3, 1, 1, 1], [1, 1, 1, 1]


def sizes(given: torch.export.ExportedProgram, **options: int) -> list[tuple[int, int]]:
    """Rows and tokens of every example, all of which run one after the other."""
    made = examples_of(given, None, options)
    call = caller(given)
    for batch in made:
        call(**batch)
        assert batch["input_ids"].min() >= VOCABULARY // 2
    return [tuple(batch["input_ids"].shape) for batch in made]


def codes(form: str, strategy: str = "attn_head", **options: Any) -> torch.export.ExportedProgram:
    return stored(form, "states", config("states", args(strategy, **options), args(strategy)), torch.float32)


def test_texts_and_steps() -> None:
    assert sizes(program("none")) == [(2, 8), (1, 7)]
    assert sizes(program("none"), max_batch=1, max_sequence=3) == [(1, 3), (1, 3)]
    assert sizes(program("static")) == [(1, tokens) for tokens in FOUR]
    assert sizes(program("static"), max_sequence=4) == [(1, 3), (1, 1)]
    assert sizes(program("static"), max_sequence=1) == [(1, 1)]
    assert sizes(program("static-3")) == [(3, tokens) for tokens in FOUR]
    assert sizes(program("one token")) == [(1, 1)] * 4
    assert sizes(program("inputs")) == [(rows, tokens) for rows in (2, 1) for tokens in FOUR]
    assert sizes(program("inputs"), max_batch=1) == [(1, tokens) for tokens in FOUR]


@pytest.mark.parametrize("strategy", ["attn_head", "token"])
def test_what_conversion_leaves_is_stepped_through_too(strategy: str) -> None:
    one = gq.specialize(codes("static", strategy), sequence=1)
    assert sizes(in_lanes(one)) == [(1, 1)] * 4
    past = codes("inputs", strategy, symmetric=False)
    assert sizes(past) == [(rows, tokens) for rows in (2, 1) for tokens in FOUR]
    decode = gq.specialize(past, sequence=1)
    assert sizes(decode) == [(rows, tokens) for rows in (2, 1) for tokens in ONES]
    grown = [tree_leaves(batch["past_key_values"]) for batch in examples_of(decode, None, {})]
    assert [leaves[0].shape[2] for leaves in grown] == [0, 1, 2, 3] * 2
    assert grown[3][0].dtype == torch.int8
    assert grown[3][0].any()


def test_a_cache_that_is_soon_full() -> None:
    for length, steps in ((2, [1, 1]), (3, [1, 1, 1])):
        made = gq.capture(tiny_llama(num_hidden_layers=1), cache="static", max_cache_len=length, sequence=1)
        assert [tokens for _, tokens in sizes(made)] == steps
        assert sizes(in_lanes(static(both(), length=length, layers=1, sequence=1))) == [(1, 1)] * length
    made = gq.capture(tiny_llama(num_hidden_layers=1), cache="static", max_cache_len=6, sequence=4)
    assert sizes(made) == [(1, 4)]


class Shifted(nn.Module):
    """Names as ``capture`` gives them, for a past of another layout ``[B, P, H, D]``, or without a present."""

    def __init__(self, by_dim_one: bool) -> None:
        super().__init__()
        self.by_dim_one, self.embed = by_dim_one, nn.Embedding(8, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, past_key_values: tuple[Tensor, Tensor]) -> Any:
        x = self.embed(input_ids) * attention_mask[:, -1:, None]
        if self.by_dim_one:
            joined = tuple(torch.cat([past, x[:, :, None]], 1) for past in past_key_values)
            return x + joined[0].sum(), joined
        return x + past_key_values[0].sum()


@pytest.mark.parametrize("by_dim_one", [True, False])
def test_another_past_is_checked_on_what_it_was_exported_with(by_dim_one: bool) -> None:
    past = torch.randn(2, 3, 1, 4)
    batch = {
        "input_ids": torch.ones(2, 2, dtype=torch.int64),
        "attention_mask": torch.ones(2, 5, dtype=torch.int64),
        "past_key_values": (past, past + 1),
    }
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    shapes = {"input_ids": dynamic, "attention_mask": dynamic, "past_key_values": (dynamic, dynamic)}
    made = gq.capture(Shifted(by_dim_one).eval(), batch, dynamic_shapes=shapes)
    (found,) = examples_of(made, None, {})
    assert torch.equal(found["past_key_values"][0], past)


class Forgetful(Lowered):
    """An artifact that computes each step as if it were the first."""

    def __init__(self, given: torch.export.ExportedProgram) -> None:
        self._given = given

    def run(self, inputs: Batch) -> list[Tensor]:
        with torch.no_grad():
            return tensors(runnable(self._given)(**inputs))

    def save(self, path: object) -> None:
        raise NotImplementedError

    def summary(self) -> Summary:
        raise NotImplementedError


def test_an_artifact_that_forgets_its_cache_is_found_without_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKENDS["inductor"], "compile", lambda given, *_: Forgetful(given))
    message = r"computes something else on input_ids int64 \[1, 1\], .*the first site that differs is \S+key_states"
    with pytest.raises(MismatchError, match=message):
        gq.lower(codes("static"), "inductor")
    with pytest.raises(MismatchError, match=message):
        gq.lower(gq.specialize(codes("static"), sequence=1), "inductor")
