"""Whether an artifact's outputs are those of a program."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram

from graphquant.backends.checking import Reference


def disagreement(found: Sequence[Tensor], program: ExportedProgram, batch: Mapping[str, Any]) -> dict[int, str]:
    """The outputs that differ by more than 1e-5 and than roundings make."""
    reference = Reference(program)
    reference.run(batch)
    return reference.wrong(found, 1e-5, strict=False)
