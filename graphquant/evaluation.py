"""``evaluate``: what quantization does to a model's predictions, beside what it does to single tensors.

Dims: B batch, S sequence, V vocabulary. A position counts where it and the next are no padding: its logits predict the
next token. Over the counted positions of all batches, with p the reference's distribution and q the model's:

    perplexity = exp(mean(−log q(next token)))      KL = mean(Σ_V p · (log p − log q)), nats a token
    top-1 agreement = share of positions at which both have the same most likely token
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from graphquant.errors import ConfigError, DataError, ModelError, NonFiniteError
from graphquant.loops import Batch, caller, each_batch, modes_restored, running
from graphquant.passes.prepared import is_prepared, set_mode
from graphquant.tables import cell, plain, render

Model = ExportedProgram | nn.Module | Callable[..., Any]
_DIGITS = {"perplexity": 5}  # where a quantized model differs from its original
_ROWS = 64  # positions handled at a time: 64 · 49152 logits are 25 MB in float64


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """How one model predicts: perplexity, KL from the reference (nats a token), agreement with it (%), over tokens."""

    perplexity: float
    kl: float
    top1_percent: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results of all models on the same tokens, by name."""

    results: Mapping[str, ModelResult]
    reference: str
    tokens: int

    def rows(self) -> list[dict[str, Any]]:
        """One row a model."""
        return [
            {
                "model": name,
                "perplexity": result.perplexity,
                f"KL from {self.reference} (nats/token)": result.kl,
                "top-1 agreement %": result.top1_percent,
                "tokens": result.tokens,
            }
            for name, result in self.results.items()
        ]

    def lines(self) -> list[str]:
        """One sentence a model, for reports."""
        return [
            f"{name}: perplexity {cell(result.perplexity, _DIGITS['perplexity'])}"
            + (
                f" over {result.tokens} tokens, the reference"
                if name == self.reference
                else f", KL from {self.reference} {cell(result.kl)} nats/token, same top-1 token at "
                f"{cell(result.top1_percent)}%"
            )
            for name, result in self.results.items()
        ]

    def table(self, fmt: str = "simple") -> str:
        """The results as a table.

        Raises:
            ConfigError: tabulate has no such format.
        """
        return render(self.rows(), fmt, digits=_DIGITS)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; an infinite perplexity is None."""
        results = {name: asdict(result) for name, result in self.results.items()}
        data: dict[str, Any] = plain({"reference": self.reference, "tokens": self.tokens, "results": results})
        return data

    def __str__(self) -> str:
        return self.table()


def evaluate(
    models: Mapping[str, Model],
    batches: Iterable[Batch],
    *,
    reference: str | None = None,
    progress: bool = True,
) -> Evaluation:
    """Perplexity of each model, and its divergence from the reference (by default the first) on the same batches.

    Batches are dicts with ``input_ids [B, S]`` and perhaps ``attention_mask [B, S]`` (0 for padding), passed once to
    every model by name; a model returns logits ``[B, S, V]``, or an output with ``.logits``. A prepared module is
    evaluated fake-quantized, an nn.Module in eval mode; both are put back as they were.

    Raises:
        ConfigError: there is no model, or none is called ``reference``.
        DataError: there is no batch, one is malformed, or no token to predict is left.
        ModelError: a model returns no logits, or a vocabulary other than the reference's.
        NonFiniteError: a logit outside the padding is NaN or Inf; the message names the model.
        NotCalibratedError: a prepared module has observed nothing.
    """
    if not isinstance(models, Mapping) or not models:
        raise ConfigError("models must be a dict of at least one name and model: {'original': program, …}")
    reference = next(iter(models)) if reference is None else reference
    if reference not in models:
        raise ConfigError(f"no model is called {reference!r}, the reference; there are {', '.join(models)}")
    sums = {name: _Sums() for name in models}
    with ExitStack() as stack, torch.no_grad():
        calls = {name: stack.enter_context(_callable(name, model)) for name, model in models.items()}
        for index, batch in enumerate(each_batch(batches, "evaluating", progress)):
            targets = _Targets.of(batch, index)
            base = targets.logits(reference, calls[reference])
            sums[reference].add(base, None, targets)
            for name in models:
                if name != reference:
                    sums[name].add(targets.logits(name, calls[name], base.shape[-1]), base, targets)
    tokens = sums[reference].tokens
    if not tokens:
        raise DataError("no token to predict: every sequence has fewer than two tokens that are no padding")
    return Evaluation(
        results={name: entry.result() for name, entry in sums.items()}, reference=reference, tokens=tokens
    )


@contextmanager
def _callable(name: str, model: Model) -> Iterator[Callable[..., Any]]:
    """The model as a function of a batch, in the state in which it is to be evaluated."""
    if isinstance(model, ExportedProgram):
        yield caller(model)
    elif isinstance(model, nn.Module) and is_prepared(model):
        with modes_restored(model):
            set_mode(model, "fake_quant")
            yield model
    elif isinstance(model, nn.Module):
        training = [(part, part.training) for part in model.modules()]
        try:
            for part, _ in training:  # by flag: exported modules refuse eval()
                part.training = False
            yield model
        finally:
            for part, mode in training:
                part.training = mode
    elif callable(model):
        yield model
    else:
        raise ConfigError(
            f"model {name!r} is a {type(model).__name__}; expected an ExportedProgram, a module or a function"
        )


@dataclass(frozen=True)
class _Targets:
    """One batch: its inputs, tokens ``[B, S]``, which are no padding, and the positions ``[N, 2]`` that predict."""

    index: int
    batch: Batch
    ids: Tensor
    real: Tensor
    positions: Tensor

    @classmethod
    def of(cls, batch: Batch, index: int) -> "_Targets":
        ids = batch.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or not ids.numel():
            raise DataError(f"batch {index} has no integer input_ids [B, S]; it has {', '.join(batch) or 'nothing'}")
        mask = batch.get("attention_mask", torch.ones_like(ids))
        if mask.shape != ids.shape:
            raise DataError(
                f"batch {index}: attention_mask {list(mask.shape)} must be of input_ids' shape {list(ids.shape)}, with "
                "0 for padding"
            )
        real = mask != 0
        return cls(index, batch, ids, real, (real[:, :-1] & real[:, 1:]).nonzero())

    def logits(self, name: str, call: Callable[..., Any], vocabulary: int | None = None) -> Tensor:
        """What a model returns for the batch, checked."""
        with running(None, self.batch, self.index):
            output = call(**self.batch)
        logits = getattr(output, "logits", output)
        shape = logits.shape if isinstance(logits, Tensor) else ()
        fits = len(shape) == 3 and shape[:2] == self.ids.shape and vocabulary in (None, shape[2])
        if not isinstance(logits, Tensor) or not fits:
            found = f"shape {list(shape)}" if shape else type(logits).__name__
            wanted = ", ".join(map(str, [*self.ids.shape, vocabulary or "V"]))
            raise ModelError(f"model {name!r} returned {found}; expected logits [{wanted}]")
        if int(self.ids.max()) >= logits.shape[-1]:
            raise DataError(
                f"batch {self.index} has token {int(self.ids.max())}, and the vocabulary of model {name!r} ends at "
                f"{logits.shape[-1] - 1}: tokenize with this model's tokenizer"
            )
        broken = self.real.to(logits.device) & ~logits.isfinite().all(-1)
        if bool(broken.any()):
            row, position = broken.nonzero()[0].tolist()
            raise NonFiniteError(
                f"model {name!r} gave a NaN or Inf in the logits of batch {self.index}, sequence {row}, position "
                f"{position}: look for one in its weights, or for scales of another model"
            )
        return logits


@dataclass
class _Sums:
    """Running sums of one model, in float64."""

    nll: float = 0.0
    kl: float = 0.0
    same: int = 0
    tokens: int = 0

    def add(self, logits: Tensor, reference: Tensor | None, targets: _Targets) -> None:
        """Add a batch; without ``reference`` the model is the reference itself."""
        for positions in torch.split(targets.positions, _ROWS):
            rows, columns = positions.unbind(1)
            following = targets.ids[rows, columns + 1].long().to(logits.device)
            log_q = _log_probabilities(logits, rows, columns)
            self.nll -= float(log_q.gather(-1, following[:, None]).sum())
            self.tokens += len(positions)
            if reference is None:
                self.same += len(positions)
                continue
            log_p = _log_probabilities(reference, rows, columns).to(log_q.device)
            self.kl += float((log_p.exp() * (log_p - log_q)).sum())
            self.same += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())

    def result(self) -> ModelResult:
        mean = self.nll / self.tokens
        return ModelResult(
            perplexity=math.exp(mean) if mean < 709 else math.inf,
            kl=self.kl / self.tokens,
            top1_percent=100.0 * self.same / self.tokens,
            tokens=self.tokens,
        )


def _log_probabilities(logits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """log softmax of ``[N, V]`` logits: float32 values, summed in float64 (a KL of 1e-7 drowns in float32 sums)."""
    return logits[rows, columns].float().log_softmax(-1, dtype=torch.float64)
