"""What a backend is: what it takes, as data; how it lowers; and what came of it.

Invariant: a setting is refused by ``capability`` before any work is done, or lowered with the right numbers. There is
no third outcome.
"""

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export import ExportedProgram

from graphquant.config import QuantizationArgs
from graphquant.errors import BackendMissingError
from graphquant.loops import input_names, positional_names, runnable
from graphquant.numerics import TensorLayout
from graphquant.passes.dialects import Emit

Batch = Mapping[str, Any]
"""Inputs by name: tensors, or trees of them."""


@dataclass(frozen=True)
class Capability:
    """Whether a backend takes a setting; if not, why, and the nearest setting that works."""

    works: bool
    reason: str = ""
    instead: str = ""


YES = Capability(True)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What became of the quantize/dequantize pairs: ops of the backend's own, or arithmetic; and what runs in integers.

    ``dedicated`` of ``pairs`` became quantization ops of the backend; ``integer_kernels`` counts what computes on the
    integers themselves; ``details`` are counts of the backend's own kind.
    """

    backend: str
    pairs: int
    dedicated: int
    integer_kernels: int
    details: Mapping[str, int]

    def lines(self) -> list[str]:
        """The statement, a sentence a line."""
        said = [f"{self.backend}: {self.dedicated} of {self.pairs} pairs are quantization ops of its own"]
        if self.pairs > self.dedicated:
            said.append(f"{self.pairs - self.dedicated} of {self.pairs} pairs stayed arithmetic in floating point")
        if self.pairs == 0:
            said = [f"{self.backend}: the program has no pairs, and was lowered in floating point"]
        elif self.integer_kernels:
            said.append(f"{self.integer_kernels} kernels compute on integers")
        else:
            said.append("nothing here runs in int8: the pairs round values, and every product is in floating point")
        said += [f"{name}: {count}" for name, count in self.details.items()]
        return said

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "backend": self.backend,
            "pairs": self.pairs,
            "dedicated": self.dedicated,
            "arithmetic": self.pairs - self.dedicated,
            "integer_kernels": self.integer_kernels,
            "details": dict(self.details),
        }

    def __str__(self) -> str:
        return "\n".join(self.lines())


@dataclass(frozen=True)
class Inputs:
    """The inputs of a program: their names in order, how many are given by position, and the sizes of each tensor.

    An input may hold tensors in a tree, such as past keys and values; ``shapes`` are those of all its tensors.
    """

    names: tuple[str, ...]
    positional: int
    shapes: tuple[tuple[int | torch.SymInt, ...], ...]

    @classmethod
    def of(cls, program: ExportedProgram) -> "Inputs":
        """The inputs of ``program``."""
        module = runnable(program)
        users = {str(name) for name in program.graph_signature.user_inputs}
        values = [node.meta["val"] for node in program.graph.nodes if node.op == "placeholder" and node.name in users]
        shapes = tuple(tuple(value.shape) for value in values if isinstance(value, Tensor))
        return cls(tuple(input_names(module)), len(positional_names(program, module)), shapes)

    def flat(self, batch: Batch) -> list[Tensor]:
        """All tensors of a batch, contiguous, in the program's order."""
        return [tensor.detach().contiguous() for tensor in tensors([batch[name] for name in self.names])]


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in a tree of inputs or outputs, flat."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class Lowered(ABC):
    """A program lowered to a backend: it runs, is saved, and says what it is."""

    @abstractmethod
    def run(self, inputs: Batch) -> list[Tensor]:
        """The outputs, flat, for the program's inputs by name."""

    def reset(self) -> None:  # noqa: B027 (most backends keep no state)
        """Forget what earlier runs wrote to buffers; nothing to do where a program keeps no state."""

    @abstractmethod
    def save(self, path: str | Path) -> None:
        """Write the artifact, whole or not at all.

        Raises:
            OutputError: the path cannot be written, or has another ending than the backend's files.
        """

    @abstractmethod
    def summary(self) -> Summary:
        """What was really lowered."""


class Backend(ABC):
    """A downstream compiler: its capability table, the dialect that it needs, and how it compiles."""

    name: ClassVar[str]
    extra: ClassVar[str | None]
    """The extra of this package that installs it; None where torch itself is enough."""
    modules: ClassVar[tuple[str, ...]]
    suffix: ClassVar[str]
    tolerance: ClassVar[float] = 1e-5
    """Largest |difference| from the program, relative to its largest |output|; the reason stands beside another."""
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float16", "bfloat16")
    options: ClassVar[tuple[str, ...]] = ()
    """Further options of ``lower`` that it knows."""
    keeps_state: ClassVar[bool] = True
    """Whether a buffer that the program writes to keeps what was written from run to run."""

    @property
    @abstractmethod
    def dialect(self) -> Emit:
        """How pairs are said to this backend."""

    @abstractmethod
    def capability(self, args: QuantizationArgs, layout: TensorLayout) -> Capability:
        """Whether a setting can be lowered with the right numbers."""

    def holds(self, dtype: str, *, in_buffer: bool) -> Capability:
        """Whether a cache may hold codes as ``dtype``, in a buffer or as an input and an output."""
        return YES

    @abstractmethod
    def compile(self, program: ExportedProgram, example: Batch, options: Mapping[str, Any]) -> Lowered:
        """Compile a program whose pairs are in this backend's dialect."""

    def missing(self) -> list[str]:
        """The modules that are needed and not installed."""
        return [name for name in self.modules if importlib.util.find_spec(name.partition(".")[0]) is None]

    def require_installed(self) -> None:
        """Refuse to go on without the backend's package.

        Raises:
            BackendMissingError: naming the extra to install.
        """
        missing = self.missing()
        if missing:
            raise BackendMissingError(
                f"backend {self.name!r} needs {', '.join(missing)}, which is not installed: pip install "
                f"'graphquant[{self.extra}]'"
            )
