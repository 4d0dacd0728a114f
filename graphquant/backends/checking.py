"""Whether an artifact computes what its program computes, up to the order in which floats are added.

Two compilers add in different orders, so a value that lies next to a rounding tie goes a step up in one and a step down
in the other, and a deep model carries such steps on: the outputs of two right compilers then differ by far more than a
float's rounding. How far is a property of the program, and is measured on it: the program is run with noise of a
rounding's size on every product and every sum, and an artifact may be as far off as that.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Interpreter, Node

from graphquant.backends.base import Batch, Inputs, tensors
from graphquant.graph.writes import written_buffers
from graphquant.loops import caller, runnable, running

NOISE, NOISE_OF_HALVES = 8.0, 1.0
"""Roundings of its dtype by which noise moves a value. Of float32 more than a sum of another order does, so that what
is measured is rarely less than what is to be expected; of half precision as much, for more would drown every pair."""
RUNS, MOST_RUNS = 3, 16
"""Runs with noise; the more where the first ones move an output not at all, as one value next to one tie does in half
of the runs."""
FACTOR = 1.5
"""How many times the measured effect an artifact may be off."""
_MOVED = frozenset(
    (
        *("linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addmv", "einsum", "_grouped_mm"),
        *("softmax", "_softmax", "sum", "mean", "rms_norm", "layer_norm", "native_layer_norm"),
        *("convolution", "conv1d", "conv2d", "conv3d"),
    )
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
            self.outputs = tensors(self._call(**batch))
        self._batches.append(batch)
        return self.outputs

    def carried(self, seeds: Iterable[int] = range(RUNS)) -> list[float]:
        """For each output of the last batch, how far roundings alone move it in a run of each seed, as
        ``rms_difference``.
        """
        names = Inputs.of(self._program).names
        worst = [0.0] * len(self.outputs)
        for seed in seeds:
            noisy = _Noisy(runnable(self._program), seed)
            # What earlier batches wrote, the last one reads.
            for batch in self._batches if written_buffers(self._program) else self._batches[-1:]:
                leaves = torch.utils._pytree.tree_leaves([batch[name] for name in names])
                with torch.no_grad():
                    outputs = tensors(noisy.run(*leaves, enable_io_processing=False))
            moved = map(rms_difference, outputs, self.outputs)
            # Where noise alone makes a number an infinity, nothing is measured, and nothing is allowed for it.
            worst = [max(old, new) if math.isfinite(new) else old for old, new in zip(worst, moved, strict=True)]
        return worst

    def wrong(self, found: Sequence[Tensor], limit: float, *, strict: bool) -> dict[int, str]:
        """Which outputs of the last batch differ, each in words.

        Those within ``limit`` of the largest |value| do not; nor, unless ``strict``, those that roundings alone move as
        far.
        """
        if len(found) != len(self.outputs):
            return {0: f"it has {len(found)} outputs, and the program {len(self.outputs)}"}
        pairs = list(zip(found, self.outputs, strict=True))
        odd = {index: unlike for index, pair in enumerate(pairs) if (unlike := _unlike(*pair))}
        far = {
            index: f"{worst:.1e} of the largest output, where {limit:.0e} is allowed"
            for index, pair in enumerate(pairs)
            if index not in odd and (worst := difference(*pair)) > limit
        }
        if strict:
            return odd | far
        carried = self.carried() if far else []
        if any(carried[index] == 0 for index in far):
            more = self.carried(range(RUNS, MOST_RUNS))
            carried = [old or new for old, new in zip(carried, more, strict=True)]
        far = {index: words for index, words in far.items() if rms_difference(*pairs[index]) > FACTOR * carried[index]}
        for index, words in far.items():
            moved = rms_difference(*pairs[index])
            far[index] = f"{words}; {moved:.1e} in root mean square, where roundings alone make {carried[index]:.1e}"
        return odd | far


class _Noisy(Interpreter):
    """Runs a program with noise of a rounding's size on every product and sum."""

    def __init__(self, module: torch.fx.GraphModule, seed: int) -> None:
        super().__init__(module)
        self._generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if not _is_moved(n):
            return value
        if isinstance(value, tuple):  # the first is what attention gives, the others are for its gradient
            return (self._moved(value[0]), *value[1:])
        return self._moved(value)

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        limits, wide = torch.finfo(value.dtype), value.double()
        roundings = NOISE if limits.bits >= 32 else NOISE_OF_HALVES
        noise = torch.randn(value.shape, generator=self._generator, dtype=torch.float64)
        level = wide[wide.isfinite()].square().mean().sqrt() if value.numel() else 0.0
        moved = wide + roundings * limits.eps * noise * (wide.abs() + level) / 2
        return torch.where(wide.isfinite(), moved.clamp(limits.min, limits.max), wide).to(value.dtype)


def _is_moved(node: Node) -> bool:
    name = str(getattr(node.target, "__name__", "")).partition(".")[0]
    return node.op == "call_function" and (name in _MOVED or _ATTENTION in name)


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest |difference|, relative to the largest |value|; infinite where the two are unlike."""
    if _unlike(found, expected):
        return math.inf
    finite = _finite(expected)
    one, other = (value.double()[finite] for value in (found, expected))
    if not other.numel():
        return 0.0
    return float((one - other).abs().max() / other.abs().max().clamp_min(torch.finfo(torch.float32).tiny))


def rms_difference(found: Tensor, expected: Tensor) -> float:
    """The root mean square of the difference at the worst position (all dims but the last), relative to that of all
    values; infinite where the two are unlike.
    """
    if _unlike(found, expected):
        return math.inf
    if not expected.numel():
        return 0.0
    finite = _finite(expected)
    one, other = (torch.where(finite, value.double(), 0.0) for value in (found, expected))
    scale = other.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    return float((one - other).square().mean(-1).sqrt().max() / scale)


def _unlike(found: Tensor, expected: Tensor) -> str:
    """In what two tensors are not even alike, or nothing."""
    if found.shape != expected.shape:
        return f"it has shape {list(found.shape)}, and the program's {list(expected.shape)}"
    if found.is_floating_point() and found.dtype != expected.dtype:
        return f"it is {found.dtype}, and the program's {expected.dtype}".replace("torch.", "")
    odd = [values.double()[~_finite(expected)].nan_to_num() for values in (found, expected)]
    if not torch.equal(_finite(found), _finite(expected)) or not torch.equal(*odd):
        return "it has NaN or Inf where the program has none, or none where it has"
    return ""


def _finite(values: Tensor) -> Tensor:
    """Which values are finite, of any dtype: torch does not tell of fp8, which a cache may hold."""
    return values.double().isfinite()
