"""``capture``: which way a model is exported, decided by what it is and by the cache that is asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from graphquant.capture.caches import capture_inputs_cache, capture_static_cache
from graphquant.capture.causal import capture_causal, is_causal
from graphquant.capture.export import default_dynamic_shapes, export, refuse_dropout
from graphquant.errors import CaptureError

CACHES = ("static", "inputs")


def capture(
    model: nn.Module | ExportedProgram,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    example_args: Sequence[Any] = (),
    dynamic_shapes: Any = None,
    cache: str | None = None,
    max_cache_len: int | None = None,
) -> ExportedProgram:
    """Export a model to an ``ExportedProgram``; a program is returned as it is.

    A Hugging Face causal model needs no example. Dims: B batch, S sequence, P past, V vocabulary, L ``max_cache_len``.

    - ``cache=None``: ``(input_ids [B, S], attention_mask [B, S]) -> logits [B, S, V]``, B and S dynamic from 1 upwards.
    - ``cache="static"``: ``(input_ids [1, S], cache_position [S]) -> logits [1, S, V]``; keys and values are buffers
      ``key_cache_N``, ``value_cache_N [1, H, L, D]`` that the program writes to, S dynamic from 1 to L.
    - ``cache="inputs"``: ``(input_ids [B, S], attention_mask [B, P + S], past_key_values) -> (logits, present)``, pairs
      ``[B, H, P, D]`` of every layer in, ``[B, H, P + S, D]`` out; B, S and P dynamic.

    Any other module takes ``example_kwargs`` and ``example_args`` (and torch.export's ``dynamic_shapes``; without them
    the first two dims of every example tensor are dynamic where the model allows it). The module, its config and its
    generation_config are not changed.

    Raises:
        CaptureError: the model has no example, cannot be exported, or would drop out values in training mode.
    """
    example = example_kwargs is not None or isinstance(example_args, Tensor) or len(example_args) > 0
    _check_cache(model, cache, max_cache_len, example)
    if isinstance(model, ExportedProgram):
        return model
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected an nn.Module or an ExportedProgram, found {type(model).__name__}")
    if isinstance(example_args, Tensor):
        raise CaptureError("example_args is a tensor; expected a tuple of inputs, such as (x,)")
    if example_kwargs is None and not example_args:
        return refuse_dropout(_capture_without_example(model, cache, max_cache_len), model)
    kwargs = dict(example_kwargs or {})
    args = tuple(example_args)
    shapes = default_dynamic_shapes(model, args, kwargs) if dynamic_shapes is None else dynamic_shapes
    return refuse_dropout(export(model, args, kwargs, shapes), model)


def _check_cache(model: object, cache: str | None, max_cache_len: int | None, example: bool) -> None:
    if cache is not None and cache not in CACHES:
        raise CaptureError(f"unknown cache {cache!r}; there are {', '.join(map(repr, CACHES))} and None")
    if (cache == "static") != (max_cache_len is not None):
        raise CaptureError('cache="static" and max_cache_len=… (in tokens) are given together, or neither is')
    if max_cache_len is not None and (isinstance(max_cache_len, bool) or max_cache_len < 2):
        raise CaptureError(f"max_cache_len must be at least 2 tokens, not {max_cache_len!r}")
    if cache is not None and (example or isinstance(model, ExportedProgram)):
        what = "an ExportedProgram" if isinstance(model, ExportedProgram) else "a model with example inputs"
        raise CaptureError(f"cache={cache!r} is for a Hugging Face causal model, and {what} was given: leave one out")


def _capture_without_example(model: nn.Module, cache: str | None, max_cache_len: int | None) -> ExportedProgram:
    if not is_causal(model):
        raise CaptureError(
            f"{type(model).__name__} is no Hugging Face causal model, so example inputs are needed: capture it by "
            "gq.capture(model, example_kwargs={...}) or example_args=(...), and give prepare the program"
        )
    if cache == "inputs":
        return capture_inputs_cache(model)
    if max_cache_len is not None:
        return capture_static_cache(model, max_cache_len)
    return capture_causal(model)
