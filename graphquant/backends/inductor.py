"""Inductor: an AOTInductor package (``.pt2``), a shared library that runs without graphquant; or torch.compile."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from graphquant.backends.base import YES, Backend, Batch, Capability, Inputs, Lowered, Summary, tensors
from graphquant.config import QuantizationArgs
from graphquant.errors import LowerError, OutputError
from graphquant.files import written_whole
from graphquant.loops import caller, runnable
from graphquant.numerics import TensorLayout
from graphquant.passes.dialects import Emit, emit_pt2e
from graphquant.records import records

FORMS = ("package", "compile")
"""``package`` is compiled ahead of time and saved as a file; ``compile`` is torch.compile, in this process."""
CONTRACTED: Mapping[str, Any] = {"cpp.enable_floating_point_contract_flag": "fast"}
"""Inductor's configuration in which a product and the sum that it goes into may be one instruction."""
_INTEGER_KERNELS = ("_weight_int8pack_mm", "onednn::qlinear", "onednn::qconv", "_int_mm")


class Inductor(Backend):
    """Everything works: the pairs are fused into pointwise loops, exact to float rounding."""

    name = "inductor"
    extra = None
    modules = ()
    suffix = ".pt2"
    tolerance = 2e-5  # it fuses and reorders sums of floats
    options = ("form", "contract")

    @property
    def dialect(self) -> Emit:
        """How pairs are said to this backend."""
        return emit_pt2e

    def capability(self, args: QuantizationArgs, layout: TensorLayout) -> Capability:
        """Every setting."""
        return YES

    def holds(self, dtype: str, *, in_buffer: bool) -> Capability:
        """What is in a buffer: a package that takes a past of int8 states computes other values (torch 2.13)."""
        if not in_buffer:
            return Capability(False, "its package computes other values of a past of codes", 'a cache="static"')
        return YES

    def compile(self, program: ExportedProgram, example: Batch, options: Mapping[str, Any]) -> Lowered:
        """Compile to a package in a temporary folder, and load it; or with torch.compile, where ``form`` says so.

        With ``contract`` a product and the sum that it goes into may become one instruction, rounded once: faster
        attention over a stored cache, and a value next to a tie of its quantization may get the other code.

        Raises:
            LowerError: ``form`` is neither.
        """
        form, pairs = options.get("form", "package"), sum(1 for _ in records(program))
        if form not in FORMS:
            raise LowerError(f"unknown form {form!r} of backend 'inductor'; there are {', '.join(FORMS)}")
        config = dict(CONTRACTED) if options.get("contract") else {}
        if form == "compile":
            return _Compiled(program, example, pairs, config)
        folder = TemporaryDirectory(prefix="graphquant-")
        path = str(Path(folder.name) / "model.pt2")
        with torch.no_grad():
            package = torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=config)
        return _Package(Path(package), folder, Inputs.of(program), pairs)


def _contiguous(value: Any) -> Any:
    return value.detach().contiguous() if isinstance(value, Tensor) else value


class _Package(Lowered):
    def __init__(self, path: Path, folder: TemporaryDirectory[str], inputs: Inputs, pairs: int) -> None:
        self._path, self._folder, self._inputs, self._pairs = path, folder, inputs, pairs
        self.reset()

    def reset(self) -> None:
        self._run = torch._inductor.aoti_load_package(str(self._path))

    def run(self, inputs: Batch) -> list[Tensor]:
        # AOTInductor trusts strides: it was compiled for contiguous inputs.
        whole = {name: torch.utils._pytree.tree_map(_contiguous, inputs[name]) for name in self._inputs.names}
        first = self._inputs.names[: self._inputs.positional]
        with torch.no_grad():
            return tensors(self._run(*(whole.pop(name) for name in first), **whole))

    def save(self, path: str | Path) -> None:
        with written_whole(path) as temporary:
            copyfile(self._path, temporary)

    def summary(self) -> Summary:
        with zipfile.ZipFile(self._path) as archive:
            sources = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".cpp")]
        return _summary(sources, self._pairs)


class _Compiled(Lowered):
    def __init__(self, program: ExportedProgram, example: Batch, pairs: int, config: dict[str, Any]) -> None:
        self._module, self._pairs = runnable(program), pairs
        self._before = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        self._call = caller(program, torch.compile(self._module, dynamic=True, options=config))
        # A graph from Inductor's cache would come without its source.
        with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
            _, self._sources = torch._inductor.utils.run_and_get_code(self._call, **example)
        self.reset()

    def reset(self) -> None:
        for name, buffer in self._module.named_buffers():
            buffer.copy_(self._before[name])

    def run(self, inputs: Batch) -> list[Tensor]:
        with torch.no_grad():
            return tensors(self._call(**inputs))

    def save(self, path: str | Path) -> None:
        raise OutputError(f"cannot write {path}: torch.compile leaves no file; lower with form='package'")

    def summary(self) -> Summary:
        return _summary(self._sources, self._pairs)


def _summary(sources: list[str], pairs: int) -> Summary:
    kernels = sum(source.count(name) for source in sources for name in _INTEGER_KERNELS)
    loops = sum(source.count('extern "C"') for source in sources)
    return Summary(
        backend="inductor",
        pairs=pairs,
        dedicated=0,
        integer_kernels=kernels,
        details={"C++ kernels, the pairs fused into them": loops},
    )
