"""``measure``: the error of every quantized tensor, in a prepared module or in a converted program.

Both give the same figures: each site's tensor as it is with all the other sites quantized, against its quantized
values, padding left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from graphquant.config import QuantizationArgs
from graphquant.errors import ConvertError
from graphquant.loops import Batch, each_batch, input_names, modes_restored, runnable, running
from graphquant.numerics import ErrorSums, TensorLayout, dynamic_qparams, expand_qparam
from graphquant.numerics.affine import clipped
from graphquant.passes.modules import kept_rows
from graphquant.passes.prepared import fake_quants, set_mode
from graphquant.records import SiteRecord, node_name, records


@dataclass(frozen=True)
class Measurement:
    """Quantization error of every quantized tensor, by site key.

    ``tokens`` is how many positions that are no padding were measured; ``quantized_as`` says how each site was
    quantized (``int8 sym tensor``), so that the figures are not taken for another conversion's.
    """

    errors: Mapping[str, ErrorSums]
    tokens: int
    quantized_as: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """JSON form; an SQNR may be infinite."""
        rows = {
            key: {
                "quantized_as": self.quantized_as[key],
                "sqnr_db": sums.sqnr_db,
                "max_abs_error": sums.max_abs_error,
                "clipped_percent": sums.clipped_percent,
                "amax": sums.amax,
            }
            for key, sums in self.errors.items()
        }
        return {"tokens": self.tokens, "sites": rows}


def measure(
    source: GraphModule | ExportedProgram,
    batches: Iterable[Batch],
    *,
    padding_mask: str | None = "attention_mask",
    progress: bool = True,
) -> Measurement:
    """Error of each site with all the others quantized too, in a prepared module or in a converted program.

    ``padding_mask`` names the 2-D input ``[B, T]`` of a converted program in which 0 marks padding; a prepared module
    has its own from ``prepare``.

    Raises:
        NotCalibratedError: a site of a prepared module has observed nothing.
        ConvertError: the source is neither, or a program that was rewritten after ``convert``.
        DataError: there is no batch, or one is no dict of the program's inputs.
    """
    with torch.no_grad():
        if isinstance(source, ExportedProgram):
            return _measure_program(source, batches, padding_mask, progress)
        return _measure_prepared(source, batches, progress)


def _measure_prepared(prepared: GraphModule, batches: Iterable[Batch], progress: bool) -> Measurement:
    with modes_restored(prepared):
        set_mode(prepared, "fake_quant")
        modules = fake_quants(prepared)
        try:
            for module in modules:
                module.errors = ErrorSums()
            for index, batch in enumerate(each_batch(batches, "measuring", progress)):
                with running(prepared, batch, index):
                    prepared(**batch)
            sites = {m.planned.key: (m.planned.layout, m.planned.args.summary()) for m in modules}
            return _measurement({m.planned.key: m.errors for m in modules if m.errors is not None}, sites)
        finally:
            for module in modules:
                module.errors = None


def _measure_program(
    program: ExportedProgram, batches: Iterable[Batch], padding_mask: str | None, progress: bool
) -> Measurement:
    meter = _Meter(program)
    for index, batch in enumerate(each_batch(batches, "measuring", progress)):
        meter.add(batch, index, padding_mask)
    return _measurement(meter.errors, {key: (site.layout, site.args.summary()) for key, site in meter.sites.items()})


def _measurement(errors: Mapping[str, ErrorSums], sites: Mapping[str, tuple[TensorLayout, str]]) -> Measurement:
    tokens = max(errors[key].count // layout.channels for key, (layout, _) in sites.items())
    return Measurement(dict(errors), tokens, {key: summary for key, (_, summary) in sites.items()})


def recorded(program: ExportedProgram) -> list[tuple[Node, SiteRecord]]:
    """The dequantize nodes of a converted program with their records, one a site.

    Raises:
        ConvertError: the program was not made by ``convert``.
    """
    found = {record.site: (node, record) for node, record in records(program)}
    if not found:
        raise ConvertError(
            "this ExportedProgram was not made by convert: none of its nodes carries a record of a quantized site; "
            "give what convert(prepared) returned, or that saved and loaded with torch.export"
        )
    return list(found.values())


def stored(program: ExportedProgram, name: str) -> Tensor:
    """A scale or zero point of a converted program.

    Raises:
        ConvertError: the program has lost it.
    """
    value = program.state_dict.get(name, program.constants.get(name))
    if not isinstance(value, Tensor):
        raise ConvertError(f"the program has a record of {name} and no tensor of that name: convert it anew")
    return value


@dataclass(frozen=True)
class _Site:
    """A site of a converted program: the node that was quantized and how; no qparams where they are dynamic."""

    source: str
    layout: TensorLayout
    args: QuantizationArgs
    qparams: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, program: ExportedProgram, record: SiteRecord) -> "_Site":
        args, layout = record.quantization_args, record.tensor_layout
        if args.dynamic:
            return cls(record.node, layout, args, None)
        scale, zero_point = (
            expand_qparam(stored(program, f"{record.site}_{name}"), layout, args.strategy, args.group_size)
            for name in ("scale", "zero_point")
        )
        return cls(record.node, layout, args, (scale, zero_point))


class _Meter(Interpreter):
    """Runs a converted program node by node, and adds up the error of each site as its dequantized value appears."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(runnable(program))
        self.extra_traceback = False  # our errors are one line each
        self.sites = {record.site: _Site.of(program, record) for _, record in recorded(program)}
        self.errors = {key: ErrorSums() for key in self.sites}
        # By the name that convert gives, and not by the record alone: other passes rename nodes, and then the node of
        # a record's name may be another tensor.
        self._keys = {node_name(key) + "_dequantize": key for key in self.sites}
        names = {node.name for node in self.graph.nodes}
        lost = [key for name, key in self._keys.items() if not {name, self.sites[key].source} <= names]
        if lost:
            raise ConvertError(
                f"the program was rewritten after convert, and {lost[0]} is not where it was: measure the program that "
                "convert returned, before run_decompositions or other passes"
            )
        self._sources = {site.source for site in self.sites.values()}
        self._values: dict[str, Tensor] = {}
        self._mask: Tensor | None = None

    def add(self, batch: Batch, index: int, padding_mask: str | None) -> None:
        """Run one batch."""
        names = input_names(self.module)
        mask = batch.get(padding_mask) if padding_mask in names else None
        self._mask = mask if mask is not None and mask.dim() == 2 else None
        try:
            with running(self.module, batch, index):
                self.run(*tree_leaves([batch[name] for name in names]), enable_io_processing=False)
        finally:
            self._values.clear()

    def run_node(self, n: Node) -> Any:
        """Run a node; keep its value if it is to be quantized, compare it if it is what came of that."""
        value = super().run_node(n)
        if n.name in self._sources:
            self._values[n.name] = value
        if n.name in self._keys:
            key = self._keys[n.name]
            self.errors[key] += self._error(key, self._values[self.sites[key].source], value)
        return value

    def _error(self, key: str, x: Tensor, values: Tensor) -> ErrorSums:
        site = self.sites[key]
        scale, zero_point = site.qparams or dynamic_qparams(x, site.args.dtype, site.args.symmetric)
        outside = clipped(x, scale, zero_point, site.args.dtype)
        x, values, outside = (kept_rows(tensor, self._mask, site.layout, key) for tensor in (x, values, outside))
        return ErrorSums.of(x, values, outside)
