"""What a program is traced with and checked on where no examples are given: random text, step by step with a cache."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from graphquant.backends.base import Batch, Inputs, tensors
from graphquant.errors import DataError
from graphquant.graph import ops
from graphquant.graph.caches import INDEXED
from graphquant.loops import caller, vocabulary_of

SIZES = ((2, 8), (1, 7))
"""Batch and sequence of texts without a cache."""
STEPS = (3, 1, 1, 1)
"""Tokens of each step with a cache, where the program takes any number of them."""


def examples_of(program: ExportedProgram, given: Sequence[Batch] | None, options: Mapping[str, Any]) -> list[Batch]:
    """The batches given, or random text for programs as ``capture`` makes them, or what was exported with.

    ``max_batch`` and ``max_sequence`` of a backend's options bound the text.

    Raises:
        DataError: those given are not the program's inputs, or there are none and the program has none of its own.
    """
    names = Inputs.of(program).names
    if given is not None:
        batches = list(given)
        wrong = next((batch for batch in batches if not isinstance(batch, Mapping) or set(batch) != set(names)), None)
        if not batches or wrong is not None:
            raise DataError(f"examples must be dicts of the program's inputs, {', '.join(names)}, at least one")
        return batches
    rows, sequence = _sizes(program)
    taken = set(names)
    if taken == {"input_ids", "attention_mask"} and rows is None and sequence is None:
        return _texts(program, options)
    if taken == {"input_ids", "cache_position"} and rows is not None:
        steps = _steps(_room(program) or sequence or STEPS[0], sequence, options)
        return _filling(_ids(program, rows, sum(steps)), steps)
    grows = taken == {"input_ids", "attention_mask", "past_key_values"}
    past = _growing_past(program, names) if grows else None
    if past is not None:
        steps = _steps(None, sequence, options)
        return [
            batch
            for count in dict.fromkeys((rows or min(2, options.get("max_batch", 2)), rows or 1))
            for batch in _growing(program, _ids(program, count, sum(steps)), steps, past)
        ]
    if not program.example_inputs:
        raise DataError(f"the program takes {', '.join(names)}: give examples=[…], dicts of these, of two sizes")
    args, kwargs = program.example_inputs
    return [dict(zip(names, args, strict=False)) | dict(kwargs)]


def _sizes(program: ExportedProgram) -> tuple[int | None, int | None]:
    """Batch and sequence of the token ids, or else of the first input; None where it is of any size."""
    inputs = program.graph_signature.user_inputs
    first = "input_ids" if "input_ids" in inputs else inputs[0]
    shape = next(node.meta["val"].shape for node in program.graph.nodes if node.name == first)
    fixed = [dim if isinstance(dim, int) else None for dim in (*shape, 1, 1)]
    return fixed[0], fixed[1]


def _ids(program: ExportedProgram, rows: int, tokens: int) -> Tensor:
    """Token ids ``[rows, tokens]`` of the upper half of the vocabulary, where no padding is."""
    generator, vocabulary = torch.Generator().manual_seed(rows), vocabulary_of(program) or 2
    return torch.randint(vocabulary // 2, vocabulary, (rows, tokens), generator=generator)


def _texts(program: ExportedProgram, options: Mapping[str, Any]) -> list[Batch]:
    made: list[Batch] = []
    for size in SIZES:
        rows, length = (min(n, options.get(key, n)) for n, key in zip(size, ("max_batch", "max_sequence"), strict=True))
        ids = _ids(program, rows, length)
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    return made


def _steps(room: int | None, sequence: int | None, options: Mapping[str, Any]) -> list[int]:
    """Tokens of each step, as many steps as the cache has room for and memory is planned for."""
    most = min(sum(STEPS) if sequence is None else sequence * len(STEPS), room or sum(STEPS) * (sequence or 1))
    if sequence is None:
        most = min(most, options.get("max_sequence", most))
    steps: list[int] = []
    for step in STEPS if sequence is None else [sequence] * len(STEPS):
        if sum(steps) + step <= most:
            steps.append(step)
    return steps or [min(sequence or 1, most)]


def _room(program: ExportedProgram) -> int | None:
    """Tokens that the smallest cache in a buffer has room for; None where none is written at an index."""
    found = []
    for node in program.graph.nodes:
        if ops.op_name(node) in INDEXED:
            given, sizes = ops.bound(node), node.meta["val"].shape
            indices = given.get("indices", ())
            dims = [given["dim"]] if "dim" in given else [dim for dim, index in enumerate(indices) if index is not None]
            found.append(prod(sizes[dim] for dim in dims))  # of a cache in tiles: tiles times the tokens of each
    return min((size for size in found if isinstance(size, int)), default=None)


def _filling(ids: Tensor, steps: Sequence[int]) -> list[Batch]:
    """The steps of a cache in buffers."""
    return [
        {"input_ids": ids[:, end - step : end].contiguous(), "cache_position": torch.arange(end - step, end)}
        for step, end in zip(steps, accumulate(steps), strict=True)
    ]


def _growing_past(program: ExportedProgram, names: Sequence[str]) -> Any:
    """The past, as the graph has it, where it grows along the last dim but one and the outputs are logits and the
    present of that past; else None.
    """
    inputs, outputs = program.call_spec.in_spec, program.call_spec.out_spec
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    args, kwargs = tree_unflatten([values.get(str(name)) for name in program.graph_signature.user_inputs], inputs)
    past = (dict(zip(names, args, strict=False)) | kwargs)["past_key_values"]
    leaves, structure = tree_flatten(past)
    if any(not isinstance(leaf, Tensor) or isinstance(leaf.shape[leaf.dim() - 2], int) for leaf in leaves):
        return None
    given = tree_unflatten([0] * outputs.num_leaves, outputs)
    pair = isinstance(given, tuple) and len(given) == 2
    return past if pair and tree_flatten(given[1])[1] == structure else None


def _growing(program: ExportedProgram, ids: Tensor, steps: Sequence[int], like: Any) -> list[Batch]:
    """The steps of a cache of inputs and outputs, from an empty one on, each with what the last one gave."""
    rows, made, call = len(ids), list[Batch](), caller(program)
    past = tree_map_only(Tensor, lambda states: _empty(states, rows), like)
    for batch in _filling(ids, steps):
        mask = torch.ones(rows, int(batch["cache_position"][-1]) + 1, dtype=torch.int64)
        made.append({"input_ids": batch["input_ids"], "attention_mask": mask, "past_key_values": past})
        with torch.no_grad():
            outputs = tensors(call(**made[-1]))
        _, past = tree_unflatten(outputs, program.call_spec.out_spec)
    return made


def _empty(states: Tensor, rows: int) -> Tensor:
    """States ``[B, H, 0, D]`` or outputs ``[B, 0, C]``, codes or their scales, of no tokens."""
    *front, _, last = states.shape
    return torch.zeros(rows, *front[1:], 0, last, dtype=states.dtype)
