"""Weights: loaded by transformers, none made up, none NaN or Inf; its errors in one line, its talk silenced.

Invariant: a model with a missing, misshapen, NaN or Inf weight is refused.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from graphquant.errors import ModelError

if TYPE_CHECKING:  # its first use imports torchao, which logs: by then the command line has logs off
    from transformers import PreTrainedModel


def load_weights(source: str | Path, options: dict[str, Any]) -> "PreTrainedModel":
    """Return the model in `source`, in eval mode, with every weight that its config asks for.

    Raises:
        ModelError: a weight is missing, misshapen, NaN or Inf.
    """
    # Left to itself transformers fills a missing weight with random numbers and only logs it.
    pair: Any = transformers.AutoModelForCausalLM.from_pretrained(
        source, output_loading_info=True, ignore_mismatched_sizes=True, trust_remote_code=False, **options
    )
    model: PreTrainedModel = pair[0].eval()
    origin = options.get("gguf_file", source)
    for fault in ("missing", "mismatched"):
        if keys := sorted(str(key) for key in pair[1][f"{fault}_keys"]):
            first = f"({len(keys)}, the first {keys[0]})"
            raise ModelError(f"{origin}: {fault} weights for its config {first}: get or save the model again")
    check_finite_weights(model)
    return model


def check_finite_weights(model: nn.Module) -> None:
    """Check in one pass that no parameter of `model` holds a NaN or an Inf.

    Raises:
        ModelError: one does; the line names the first such parameter.
    """
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if values.itemsize == 1:  # fp8 has none of the operators below
            values = values.float()
        if not values.is_floating_point() or values.numel() == 0:
            continue
        # aminmax passes a NaN on and needs no mask: 10 times as fast as isfinite().all() on SmolLM2.
        low, high = torch.aminmax(values)
        if not (low.isfinite() and high.isfinite()):
            found = f"{int(values.isnan().sum())} NaN and {int(values.isinf().sum())} Inf"
            raise ModelError(
                f"parameter {name} ({parameter.dtype}) has {found} among its {values.numel()} values, expected none:"
                " the file is damaged, or the dtype too narrow for its values (try float32)"
            )


@contextlib.contextmanager
def failing_as(message: str) -> Iterator[None]:
    """Turn what is raised inside into a ModelError that opens with `message`; a ModelError passes as it is."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # transformers raises nearly every kind
        raise ModelError(f"{message} ({reason(error)})") from error


def reason(error: BaseException) -> str:
    """Return the kind of `error` and the first line of its text."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), 'no message')}"


@contextlib.contextmanager
def quiet(verbose: bool) -> Iterator[None]:
    """Silence transformers' own bars and warnings; the download bars of the hub stay."""
    if verbose:
        yield
        return
    log: Any = transformers.utils.logging  # partly untyped
    level = log.get_verbosity()
    hook = log.set_tqdm_hook(lambda factory, args, kwargs: factory(*args, **{**kwargs, "disable": True}))
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(level)
        log.set_tqdm_hook(hook)
