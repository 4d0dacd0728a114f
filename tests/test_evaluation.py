"""``evaluate`` against plain torch arithmetic, for all kinds of model, with padding and in any batching."""

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from transformers import LlamaForCausalLM

import graphquant as gq
from graphquant.errors import ConfigError, DataError, ModelError, NonFiniteError, NotCalibratedError
from tests.tiny import VOCABULARY, tiny_batch, tiny_batches, tiny_llama


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def prepared(tiny_program: ExportedProgram) -> GraphModule:
    module = gq.prepare(tiny_program, gq.preset("int4-kv-channel"))
    gq.calibrate(module, tiny_batches(), progress=False)
    return module


@pytest.fixture(scope="module")
def converted(prepared: GraphModule) -> ExportedProgram:
    return gq.convert(prepared)


def single_rows(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: value[row : row + 1] for name, value in batch.items()} for row in range(len(batch["input_ids"]))]


def expected(call: Callable[..., Tensor], reference: Callable[..., Tensor], batches: Any) -> tuple[float, float, float]:
    """Perplexity, KL and agreement by the definition, one sequence without its padding at a time."""
    nll, kl, same = [], [], []
    for batch in batches:
        with torch.no_grad():
            outputs = zip(call(**batch).double(), reference(**batch).double(), strict=True)
        for (q, p), ids, mask in zip(outputs, batch["input_ids"], batch["attention_mask"], strict=True):
            q, p, ids = q[mask == 1][:-1], p[mask == 1][:-1], ids[mask == 1][1:]
            log_q, log_p = q.log_softmax(-1), p.log_softmax(-1)
            nll.append(nn.functional.cross_entropy(q, ids, reduction="none"))
            kl.append(nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1))
            same.append((q.argmax(-1) == p.argmax(-1)).double())
    return math.exp(torch.cat(nll).mean()), float(torch.cat(kl).mean()), 100 * float(torch.cat(same).mean())


def test_figures_are_those_of_plain_torch(tiny_program: ExportedProgram, converted: ExportedProgram) -> None:
    evaluation = gq.evaluate({"original": tiny_program, "converted": converted}, tiny_batches())
    original, quantized = tiny_program.module(), converted.module()
    for name, call in (("original", original), ("converted", quantized)):
        result = evaluation.results[name]
        perplexity, kl, same = expected(call, original, tiny_batches())
        assert result.perplexity == pytest.approx(perplexity, rel=1e-9)
        assert result.kl == pytest.approx(kl, rel=1e-6, abs=1e-15)
        assert result.top1_percent == pytest.approx(same)
        assert result.tokens == evaluation.tokens == 2 * 10 + 6 + 6
    assert evaluation.results["original"].kl == 0
    assert evaluation.results["converted"].kl > 1e-6
    assert evaluation.results["converted"].perplexity != evaluation.results["original"].perplexity


def test_any_batching_gives_the_same(tiny_program: ExportedProgram, converted: ExportedProgram) -> None:
    """Exactly so for models that do not round otherwise for another batch size; a flipped int4 code costs 1e-5."""
    batch = tiny_batch(3, 11, padding=4)
    first, second = (nn.Embedding(VOCABULARY, VOCABULARY) for _ in range(2))
    models = {
        "first": lambda input_ids, attention_mask: first(input_ids),
        "second": lambda input_ids, attention_mask: second(input_ids),
        "original": tiny_program,
        "converted": converted,
    }
    once, apart = gq.evaluate(models, [batch]), gq.evaluate(models, single_rows(batch))
    tolerance = {"first": 1e-12, "second": 1e-12, "original": 1e-6, "converted": 1e-3}
    for name, result in once.results.items():
        other = apart.results[name]
        assert result.perplexity == pytest.approx(other.perplexity, rel=tolerance[name])
        assert result.kl == pytest.approx(other.kl, rel=tolerance[name])
        assert (result.top1_percent, result.tokens) == (other.top1_percent, other.tokens)


def test_all_kinds_of_model_agree(
    tiny_program: ExportedProgram, model: LlamaForCausalLM, prepared: GraphModule, converted: ExportedProgram
) -> None:
    results = gq.evaluate(
        {
            "program": tiny_program,
            "model": model,  # returns an output with .logits
            "module": tiny_program.module(),
            "function": lambda **batch: SimpleNamespace(logits=model(**batch).logits),
            "prepared": prepared,
            "converted": converted,
        },
        tiny_batches(),
    ).results
    assert results["prepared"] == results["converted"]
    assert results["prepared"].kl > 1e-6
    for name in ("model", "module", "function"):
        assert results[name].perplexity == pytest.approx(results["program"].perplexity, rel=1e-6)
        assert results[name].kl < 1e-10


def test_modes_are_put_back(tiny_program: ExportedProgram, model: LlamaForCausalLM, prepared: GraphModule) -> None:
    batch = tiny_batch(2, 6)
    original = tiny_program.module()(**batch)
    gq.set_mode(prepared, "off")
    model.train()
    model.model.layers[0].eval()
    modes = [part.training for part in model.modules()]
    seen = []

    def spy(**batch: Tensor) -> Tensor:
        seen.append(any(part.training for part in model.modules()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gq.evaluate({"prepared": prepared, "model": model, "spy": spy}, [batch])
    assert seen == [False]
    assert [part.training for part in model.modules()] == modes
    assert torch.equal(prepared(**batch), original)
    model.eval()


def test_reference_is_the_first_or_the_one_named(tiny_program: ExportedProgram, converted: ExportedProgram) -> None:
    models = {"converted": converted, "original": tiny_program}
    forward = gq.evaluate(models, tiny_batches())
    backward = gq.evaluate(models, tiny_batches(), reference="original")
    assert (forward.reference, backward.reference) == ("converted", "original")
    assert forward.results["converted"].kl == backward.results["original"].kl == 0
    assert forward.results["original"].kl != backward.results["converted"].kl  # KL is not symmetric
    assert list(backward.results) == ["converted", "original"]


def table_model(logits: Tensor) -> Callable[..., Tensor]:
    """A model whose logits ``[V]`` are the same at every position."""
    return lambda input_ids, **_: logits.expand(*input_ids.shape, -1)


def test_figures_of_a_distribution_known_by_heart() -> None:
    """p = (1/2, 1/4, 1/8, 1/8), q uniform: perplexity over tokens 0, 1 is √(2·4), of q 4; KL(p‖q) = ¼ ln 2."""
    p = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 8]).log()
    batch = {"input_ids": torch.tensor([[3, 0, 1]])}
    results = gq.evaluate({"p": table_model(p), "q": table_model(torch.zeros(4))}, [batch]).results
    assert results["p"].perplexity == pytest.approx(8**0.5)
    assert results["q"].perplexity == pytest.approx(4)
    assert results["q"].kl == pytest.approx(0.25 * math.log(2))
    assert results["p"].top1_percent == results["q"].top1_percent == 100
    assert results["q"].tokens == 2


def test_a_target_counts_if_it_and_its_predecessor_are_no_padding() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 0, 1, 0, 1]])
    ids = torch.zeros_like(mask)
    nan = torch.where(mask[..., None] == 0, torch.nan, torch.zeros(2, 6, 4))  # what is padded is not even looked at
    result = gq.evaluate({"m": lambda **_: nan}, [{"input_ids": ids, "attention_mask": mask}]).results["m"]
    assert (result.tokens, result.perplexity) == (3, pytest.approx(4))


def test_long_sequences_are_summed_in_parts() -> None:
    """300 positions are five parts of 64 rows; the figure is that of all of them at once."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (2, 151), generator=generator)
    p, q = (torch.randn(2, 151, 50, generator=generator) for _ in range(2))
    results = gq.evaluate({"p": lambda **_: p, "q": lambda **_: q.bfloat16()}, [{"input_ids": ids}]).results
    q = q.bfloat16().float()
    nll = nn.functional.cross_entropy(q[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    kl = nn.functional.kl_div(
        q[:, :-1].log_softmax(-1), p[:, :-1].log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    assert results["q"].tokens == 300
    assert results["q"].perplexity == pytest.approx(math.exp(nll), rel=1e-5)
    assert results["q"].kl == pytest.approx(float(kl.mean()), rel=1e-5)


def test_a_non_finite_logit_names_the_model_and_the_place(tiny_program: ExportedProgram) -> None:
    def broken(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        if input_ids.shape[0] == 1:
            logits[0, 6, 5] = torch.inf
        return logits

    with pytest.raises(
        NonFiniteError, match=r"model 'broken' gave a NaN or Inf in the logits of batch 1, sequence 0, position 6"
    ):
        gq.evaluate({"original": tiny_program, "broken": broken}, tiny_batches())


def zeros(*shape: int) -> Callable[..., Tensor]:
    return lambda **_: torch.zeros(*shape)


@pytest.mark.parametrize(
    ("models", "reference", "message"),
    [
        ({}, None, "models must be a dict of at least one name and model"),
        ([zeros(1)], None, "models must be a dict"),
        ({"a": zeros(1), "b": zeros(1)}, "c", "no model is called 'c', the reference; there are a, b"),
        ({"a": "model.pt2"}, None, "model 'a' is a str; expected an ExportedProgram, a module or a function"),
    ],
)
def test_models_that_cannot_be_evaluated(models: Any, reference: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gq.evaluate(models, tiny_batches(), reference=reference)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (zeros(2, 5), r"model 'b' returned shape \[2, 5\]; expected logits \[2, 5, 9\]"),
        (zeros(2, 4, 9), r"model 'b' returned shape \[2, 4, 9\]; expected logits \[2, 5, 9\]"),
        (zeros(2, 5, 8), r"model 'b' returned shape \[2, 5, 8\]; expected logits \[2, 5, 9\]"),
        (lambda **_: (1, 2), r"model 'b' returned tuple; expected logits \[2, 5, 9\]"),
    ],
)
def test_outputs_that_are_no_logits(output: Callable[..., Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        gq.evaluate({"a": zeros(2, 5, 9), "b": output}, [{"input_ids": torch.zeros(2, 5, dtype=torch.int64)}])


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "evaluating: there is not a single batch"),
        ([tiny_batch(2, 1), tiny_batch(1, 1)], "no token to predict: every sequence has fewer than two tokens"),
        ([tiny_batch(1, 5, padding=4)], "no token to predict"),
        ([{"ids": torch.zeros(1, 2)}], r"batch 0 has no integer input_ids \[B, S\]; it has ids"),
        ([{"input_ids": torch.zeros(1, 2)}], "batch 0 has no integer input_ids"),
        ([{"input_ids": torch.zeros(1, 0, dtype=torch.int64)}], "batch 0 has no integer input_ids"),
        (
            [tiny_batch(1, 5) | {"attention_mask": torch.ones(1, 1, 5, 5)}],
            r"attention_mask \[1, 1, 5, 5\] must be of input_ids' shape \[1, 5\]",
        ),
        ([{"input_ids": torch.tensor([[0, 9]])}], "batch 0 has token 9, and the vocabulary of model 'm' ends at 8"),
    ],
)
def test_batches_that_cannot_be_used(batches: list[dict[str, Tensor]], message: str) -> None:
    vocabulary = 9 if "vocabulary" in message else VOCABULARY
    with pytest.raises(DataError, match=message):
        gq.evaluate({"m": table_model(torch.zeros(vocabulary))}, batches)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY)

    def forward(self, input_ids: Tensor, *, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.table(input_ids) * attention_mask[..., None]
        return logits


def test_a_program_with_inputs_by_position() -> None:
    module, batch = Table(), tiny_batch(2, 5)
    mask = {"attention_mask": batch["attention_mask"]}
    program = gq.capture(module, mask, example_args=(batch["input_ids"],))
    results = gq.evaluate({"module": module, "program": program}, [batch]).results
    assert results["program"] == results["module"]
    with pytest.raises(DataError, match=r"^the batches have input_ids; the program takes input_ids, attention_mask$"):
        gq.evaluate({"program": program}, [{"input_ids": batch["input_ids"]}])


def test_a_model_that_a_batch_does_not_fit(model: LlamaForCausalLM) -> None:
    batch = tiny_batch(1, 5) | {"use_cache": torch.tensor(True), "position_ids": torch.zeros(1, 2, 3)}
    with pytest.raises(DataError, match=r"^batch 1 \(input_ids int64 \[1, 5\], .*\) cannot be run: "):
        gq.evaluate({"m": model}, [tiny_batch(1, 5), batch])


def test_an_uncalibrated_module_is_refused(tiny_program: ExportedProgram) -> None:
    with pytest.raises(NotCalibratedError, match="4 sites have observed nothing"):
        gq.evaluate({"prepared": gq.prepare(tiny_program, gq.preset("int8-kv-tensor"))}, tiny_batches())


def test_renderings() -> None:
    p = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 8]).log()
    batch = {"input_ids": torch.tensor([[3, 0, 1]])}
    evaluation = gq.evaluate({"p": table_model(p), "q": table_model(torch.zeros(4))}, [batch])
    assert str(evaluation) == (
        "model      perplexity    KL from p (nats/token)    top-1 agreement %    tokens\n"
        "-------  ------------  ------------------------  -------------------  --------\n"
        "p              2.8284                         0                  100         2\n"
        "q                   4                    0.1733                  100         2"
    )
    assert evaluation.table("github").splitlines()[1].startswith("|---")
    with pytest.raises(ConfigError, match="unknown table format 'no'"):
        evaluation.table("no")
    assert evaluation.rows()[1]["KL from p (nats/token)"] == evaluation.results["q"].kl
    assert json.loads(json.dumps(evaluation.to_dict())) == evaluation.to_dict()
    assert evaluation.to_dict()["results"]["q"]["kl"] == evaluation.results["q"].kl


def test_a_perplexity_beyond_float64_is_infinite() -> None:
    far = torch.tensor([0.0, 2000.0])
    evaluation = gq.evaluate({"far": table_model(far)}, [{"input_ids": torch.tensor([[0, 0]])}])
    assert evaluation.results["far"].perplexity == math.inf
    assert evaluation.to_dict()["results"]["far"]["perplexity"] is None
    assert "inf" in str(evaluation)
