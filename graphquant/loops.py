"""Passing batches through a module: ``calibrate``, and what every such loop shares."""

from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from tqdm import tqdm

from graphquant.calibration import Calibration
from graphquant.errors import DataError
from graphquant.passes.prepared import calibration_of, fake_quants, observers, origin_of, set_mode

Batch = Mapping[str, Tensor]


def calibrate(prepared: GraphModule, batches: Iterable[Batch], *, progress: bool = True) -> Calibration:
    """Run ``batches`` (dicts of the program's inputs) through a prepared module and return all it has seen so far.

    A second call adds to the first. On an error or interruption the module keeps what it saw before.

    Raises:
        DataError: there is no batch, or one is no dict of tensors.
        NonFiniteError: a NaN or Inf was observed; the message names the site and the batch.
    """
    set_mode(prepared, "observe")
    with torch.no_grad():
        for batch in each_batch(batches, "calibrating", progress):
            with _whole_batch(prepared):
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


def runnable(program: ExportedProgram) -> GraphModule:
    """The program as a module with buffers of its own: a cache that it writes to stays as it is in the program."""
    module = program.module()
    assert isinstance(module, GraphModule)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.detach().clone()
    return module
