"""``capture``: which way a model is exported, decided by what it is and by the cache that is asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram

from graphquant.capture.causal import capture_causal, is_causal
from graphquant.capture.export import default_dynamic_shapes, export, refuse_dropout
from graphquant.capture.inputs_cache import capture_inputs_cache
from graphquant.capture.options import CacheOptions
from graphquant.capture.static_cache import capture_static_cache
from graphquant.errors import CaptureError


def capture(
    model: nn.Module | ExportedProgram,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    example_args: Sequence[Any] = (),
    dynamic_shapes: Any = None,
    cache: str | None = None,
    max_cache_len: int | None = None,
    sequence: int | None = None,
    batch: int | None = None,
) -> ExportedProgram:
    """Export a model to an ``ExportedProgram``; a program is returned as it is.

    A Hugging Face causal model needs no example. Dims: B batch, S sequence, P past, V vocabulary, L ``max_cache_len``.

    - ``cache=None``: ``(input_ids [B, S], attention_mask [B, S]) -> logits [B, S, V]``, B and S dynamic from 1 upwards.
    - ``cache="static"``: ``(input_ids [B, S], cache_position [S]) -> logits [B, S, V]``; keys and values are buffers
      ``key_cache_N``, ``value_cache_N [B, H, L, D]`` that the program writes to, B 1, S dynamic from 1 to L.
    - ``cache="inputs"``: ``(input_ids [B, S], attention_mask [B, P + S], past_key_values) -> (logits, present)``, pairs
      ``[B, H, P, D]`` of every layer in, ``[B, H, P + S, D]`` out; B, S and P dynamic.
    - ``sequence=N``, with a cache: S is N; ``1`` decodes: ``input_ids [B, 1]``, ``attention_mask [B, P + 1]``.
    - ``batch=N``, with ``cache="static"``: B is N; ``cache_position [S]`` is that of every row.

    Any other module takes ``example_kwargs`` and ``example_args`` (and torch.export's ``dynamic_shapes``; without them
    the first two dims of every example tensor are dynamic where the model allows it). The module, its config and its
    generation_config are not changed.

    Raises:
        CaptureError: the model has no example, cannot be exported, or would drop out values in training mode.
    """
    example = example_kwargs is not None or isinstance(example_args, Tensor) or len(example_args) > 0
    options = CacheOptions(cache=cache, max_cache_len=max_cache_len, sequence=sequence, batch=batch)
    options.check(model, example)
    if isinstance(model, ExportedProgram):
        return model
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected an nn.Module or an ExportedProgram, found {type(model).__name__}")
    made = _by_example(model, example_kwargs, example_args, dynamic_shapes) if example else _causal(model, options)
    return refuse_dropout(made, model)


def _by_example(
    model: nn.Module, example_kwargs: Mapping[str, Any] | None, example_args: Sequence[Any], dynamic_shapes: Any
) -> ExportedProgram:
    if isinstance(example_args, Tensor):
        raise CaptureError("example_args is a tensor; expected a tuple of inputs, such as (x,)")
    args, kwargs = tuple(example_args), dict(example_kwargs or {})
    shapes = default_dynamic_shapes(model, args, kwargs) if dynamic_shapes is None else dynamic_shapes
    return export(model, args, kwargs, shapes)


def _causal(model: nn.Module, options: CacheOptions) -> ExportedProgram:
    if not is_causal(model):
        raise CaptureError(
            f"{type(model).__name__} is no Hugging Face causal model, so example inputs are needed: capture it by "
            "gq.capture(model, example_kwargs={...}) or example_args=(...), and give prepare the program"
        )
    if options.cache == "inputs":
        return capture_inputs_cache(model, sequence=options.sequence)
    if options.max_cache_len is not None:
        batch = 1 if options.batch is None else options.batch
        return capture_static_cache(model, options.max_cache_len, sequence=options.sequence, batch=batch)
    return capture_causal(model)
