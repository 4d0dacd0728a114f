"""Passing batches through a module: ``calibrate``, and what every such loop shares."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from tqdm import tqdm

from graphquant.calibration import Calibration
from graphquant.errors import DataError, GraphQuantError
from graphquant.passes.prepared import calibration_of, fake_quants, observers, origin_of, set_mode

Batch = Mapping[str, Tensor]


def calibrate(prepared: GraphModule, batches: Iterable[Batch], *, progress: bool = True) -> Calibration:
    """Run ``batches`` (dicts of the program's inputs) through a prepared module and return all it has seen so far.

    A second call adds to the first. On an error or interruption the module keeps what it saw before.

    Raises:
        DataError: there is no batch, or one is no dict of the program's inputs, of shapes that it takes.
        NonFiniteError: a NaN or Inf was observed; the message names the site and the batch.
    """
    set_mode(prepared, "observe")
    with torch.no_grad():
        for index, batch in enumerate(each_batch(batches, "calibrating", progress)):
            with _whole_batch(prepared), running(prepared, batch, index):
                prepared(**batch)
    return calibration_of(prepared)


@contextmanager
def _whole_batch(prepared: GraphModule) -> Iterator[None]:
    """Let a batch count at every site or, where it fails at one of them, at none."""
    before = [(observer, observer.snapshot()) for observer in observers(prepared)]
    try:
        yield
    except BaseException:
        for observer, snapshot in before:
            observer.restore(snapshot)
        raise


def each_batch(batches: Iterable[Batch], what: str, progress: bool) -> Iterator[Batch]:
    """The batches, checked, under a progress bar that shows itself after 2 seconds.

    Raises:
        DataError: no batch at all, or one that is no mapping of names to tensors.
    """
    if isinstance(batches, Mapping | Tensor):
        raise DataError("batches must be an iterable of dicts, one a batch: put this one into a list")
    total = len(batches) if isinstance(batches, Sized) else None
    count = 0
    for batch in tqdm(batches, desc=what, total=total, unit="batch", delay=2.0, disable=not progress, leave=False):
        if not isinstance(batch, Mapping):
            raise DataError(
                f"batch {count} is a {type(batch).__name__}; expected a dict such as "
                "{'input_ids': …, 'attention_mask': …}"
            )
        for name, value in batch.items():
            leaves = torch.utils._pytree.tree_leaves(value)
            if not all(leaf is None or isinstance(leaf, Tensor | bool) for leaf in leaves):
                raise DataError(f"batch {count}: {name!r} is a {type(value).__name__}; expected a tensor")
        yield batch
        count += 1
    if not count:
        raise DataError(f"{what}: there is not a single batch; give at least one dict of the program's inputs")


def input_names(module: Any) -> list[str]:
    """The names of a program's inputs, in the order of its signature; one that holds tensors in a tree is one name."""
    tree = getattr(module.graph._codegen, "pytree_info", None)
    return list(tree.orig_args) if tree else [str(n.target) for n in module.graph.nodes if n.op == "placeholder"]


@contextmanager
def running(module: nn.Module | None, batch: Batch, index: int) -> Iterator[None]:
    """Check a batch against a program's inputs, and say which batch it was that torch could not run.

    Raises:
        DataError: an input is missing or unknown, or the program does not take its shape or dtype.
    """
    if module is not None:
        names = input_names(getattr(module, "_orig_mod", module))  # behind torch.compile
        if set(names) != set(batch):
            raise DataError(f"batch {index} has {', '.join(batch) or 'nothing'}; the program takes {', '.join(names)}")
    try:
        yield
    except GraphQuantError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError, AssertionError) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DataError(f"batch {index} ({shapes_of(batch)}) cannot be run: {first}") from error


def shapes_of(batch: Batch) -> str:
    """A batch in words: ``input_ids int64 [2, 8]``."""
    return ", ".join(
        f"{name} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        for name, value in batch.items()
        if isinstance(value, Tensor)
    )


@contextmanager
def modes_restored(prepared: nn.Module) -> Iterator[None]:
    """Leave every observer and fake-quant module as enabled as it was, whatever happens inside."""
    origin_of(prepared)
    modules = [*observers(prepared), *fake_quants(prepared)]
    before = [module.enabled for module in modules]
    try:
        yield
    finally:
        for module, enabled in zip(modules, before, strict=True):
            module.enabled = enabled


def caller(program: ExportedProgram, compiled: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """The program as a function of its inputs by name, also of those that it was exported with by position.

    ``compiled`` is called in place of a runnable copy of it.
    """
    module = runnable(program)
    run = module if compiled is None else compiled
    names, positional = input_names(module), positional_names(program, module)

    def call(**batch: Any) -> Any:
        if set(names) != set(batch):
            raise DataError(f"the batches have {', '.join(batch)}; the program takes {', '.join(names)}")
        rest = {name: value for name, value in batch.items() if name not in positional}
        return run(*(batch[name] for name in positional), **rest)

    return call


def positional_names(program: ExportedProgram, module: GraphModule) -> list[str]:
    """The inputs that a program was exported with by position."""
    spec = program.call_spec.in_spec
    return input_names(module)[: spec.child(0).num_children] if spec else []


def runnable(program: ExportedProgram) -> GraphModule:
    """The program as a module with buffers of its own: a cache that it writes to stays as it is in the program."""
    module = program.module()
    assert isinstance(module, GraphModule)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.detach().clone()
    return module


def vocabulary_of(program: ExportedProgram) -> int | None:
    """The last dim of the logits ``[B, S, V]``; None where the program's first output is no such tensor."""
    name = program.graph_signature.user_outputs[0]
    value = next((node.meta.get("val") for node in program.graph.nodes if node.name == name), None)
    size = value.shape[-1] if isinstance(value, Tensor) and value.dim() == 3 else None
    return size if isinstance(size, int) else None
