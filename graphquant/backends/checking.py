"""Whether an artifact computes what its program computes, up to the order in which floats are added.

Two compilers add in different orders, so a value that lies next to a rounding tie goes a step up in one and a step down
in the other, and a deep model carries such steps on: the outputs of two right compilers then differ by far more than a
float's rounding. How far is a property of the program, and is measured on it: the program is run with noise of a
rounding's size on every product, and an artifact may be as far off as that.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node

from graphquant.backends.base import Batch, Inputs
from graphquant.graph.writes import written_buffers
from graphquant.loops import caller, runnable, running

NOISE = 8
"""Roundings of its dtype by which noise moves a product: more than a sum of another order does, so that what is
measured is no less than what is to be expected."""
RUNS = 3
FACTOR = 2.0
"""How many times the measured effect (root mean square, the largest of the runs) an artifact may be off."""
_PRODUCTS = frozenset(
    ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "softmax", "_softmax", "convolution", "conv1d")
)
_ATTENTION = "scaled_dot_product"


class Reference:
    """A program's outputs on batches in their order: a cache that one fills, the next one reads."""

    def __init__(self, program: ExportedProgram) -> None:
        self._program, self._call = program, caller(program)
        self._batches: list[Batch] = []
        self.outputs: list[Tensor] = []

    def run(self, batch: Batch) -> list[Tensor]:
        """The outputs for the next batch, flat."""
        with torch.no_grad(), running(None, batch, len(self._batches)):
            self.outputs = _tensors(self._call(**batch))
        self._batches.append(batch)
        return self.outputs

    def carried(self) -> list[float]:
        """For each output of the last batch, how far roundings alone move it, relative to its root mean square."""
        names = Inputs.of(self._program).names
        worst = [0.0] * len(self.outputs)
        for seed in range(RUNS):
            noisy = _Noisy(runnable(self._program), seed)
            # What earlier batches wrote, the last one reads.
            for batch in self._batches if written_buffers(self._program) else self._batches[-1:]:
                leaves = torch.utils._pytree.tree_leaves([batch[name] for name in names])
                with torch.no_grad():
                    outputs = _tensors(noisy.run(*leaves, enable_io_processing=False))
            moved = map(rms_difference, outputs, self.outputs)
            worst = [max(pair) for pair in zip(worst, moved, strict=True)]
        return worst

    def wrong(self, found: Sequence[Tensor], limit: float, *, strict: bool) -> dict[int, float]:
        """Which outputs of the last batch differ, and by how much of the largest |value|.

        Those within ``limit`` do not; nor, unless ``strict``, those that roundings alone move as far.
        """
        if len(found) != len(self.outputs):
            return {0: math.inf}
        pairs = list(zip(found, self.outputs, strict=True))
        far = {index: worst for index, pair in enumerate(pairs) if (worst := difference(*pair)) > limit}
        if not far or strict:
            return far
        carried = self.carried()
        return {index: worst for index, worst in far.items() if rms_difference(*pairs[index]) > FACTOR * carried[index]}


class _Noisy(Interpreter):
    """Runs a program with noise of a rounding's size on every product."""

    def __init__(self, module: torch.fx.GraphModule, seed: int) -> None:
        super().__init__(module)
        self._generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if not isinstance(value, Tensor) or not value.is_floating_point() or not _is_product(n):
            return value
        size = NOISE * torch.finfo(value.dtype).eps
        noise = torch.randn(value.shape, generator=self._generator)
        wide = value.float()
        return (wide + size * noise * (wide.abs() + wide.square().nanmean().sqrt())).to(value.dtype)


def _is_product(node: Node) -> bool:
    name = str(getattr(node.target, "__name__", "")).partition(".")[0]
    return node.op == "call_function" and (name in _PRODUCTS or _ATTENTION in name)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest |difference|, relative to the largest |value|; infinite where shape or what is no number differ."""
    compared = _finite(found, expected)
    if compared is None:
        return math.inf
    one, other = compared
    if not other.numel():
        return 0.0
    scale = float(other.abs().max().clamp_min(torch.finfo(torch.float32).tiny))
    return float((one - other).abs().max()) / scale


def rms_difference(found: Tensor, expected: Tensor) -> float:
    """The root mean square of the difference, relative to that of the values; infinite as in ``difference``."""
    compared = _finite(found, expected)
    if compared is None:
        return math.inf
    one, other = compared
    if not other.numel():
        return 0.0
    scale = float(other.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny))
    return float((one - other).square().mean().sqrt()) / scale


def _finite(found: Tensor, expected: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both in double where they are finite, or None where they have other shapes, or other values that are not."""
    if found.shape != expected.shape:
        return None
    one, other = found.double(), expected.double()
    finite = other.isfinite()
    odd, other_odd = (values[~finite].nan_to_num() for values in (one, other))
    if not torch.equal(one.isfinite(), finite) or not torch.equal(odd, other_odd):
        return None
    return one[finite], other[finite]
