"""The rows of a report: one quantized tensor each, from a converted program's records or a prepared module's plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram

from graphquant.calibration import SiteStatistics
from graphquant.config import QuantizationArgs
from graphquant.errors import CalibrationError
from graphquant.graph.sites import INPUTS, OUTPUTS, STATES
from graphquant.measuring import Measurement, stored
from graphquant.plan import PlannedSite
from graphquant.records import SiteRecord

_ROLES = (*INPUTS, *OUTPUTS, *STATES)


@dataclass(frozen=True, kw_only=True)
class ReportRow:
    """One quantized tensor; ``also`` are further sites that are the same tensor.

    ``node`` is the dequantize node of a converted program, the node to be quantized of a prepared one. ``amax`` is the
    largest |x| in calibration; ``stored`` is the cache that holds the codes. Figures that are not known are None.
    """

    layer: int
    site: str
    also: tuple[str, ...]
    node: str
    strategy: str
    dtype: str
    bits: int
    observer: str
    scale_shape: str
    scale_min: float | None = None
    scale_max: float | None = None
    amax: float | None = None
    clipped_percent: float | None = None
    sqnr_db: float | None = None
    max_abs_error: float | None = None
    stored: str | None = None

    @property
    def quantized_as(self) -> str:
        """Number format and strategy in a few words, as ``QuantizationArgs.summary`` has it."""
        return f"{self.dtype} {self.strategy}" + (" dynamic" if self.observer == "dynamic" else "")

    @property
    def order(self) -> tuple[int, int]:
        """Where the row stands in a report: by layer, then inputs, outputs and states, each as query, key, value."""
        return self.layer, next((index for index, role in enumerate(_ROLES) if self.site.endswith(role)), len(_ROLES))

    def cells(self) -> dict[str, Any]:
        """The row by column heading."""
        return {
            "layer": self.layer,
            "site": self.site + (f" (+{len(self.also)})" if self.also else ""),
            "node": self.node,
            "strategy": self.strategy,
            "dtype": self.dtype,
            "observer": self.observer,
            "scale shape": self.scale_shape,
            "scale min": self.scale_min,
            "scale max": self.scale_max,
            "amax": self.amax,
            "clipped %": self.clipped_percent,
            "SQNR dB": self.sqnr_db,
            "max abs error": self.max_abs_error,
            "stored in": self.stored,
        }


def program_row(program: ExportedProgram, node: str, record: SiteRecord) -> ReportRow:
    """The row of a dequantize node of a converted program, its scale read from the state dict."""
    args = record.quantization_args
    return ReportRow(
        layer=record.layer,
        site=record.site,
        also=record.also,
        node=node,
        scale_shape=record.scale_shape,
        amax=record.amax,
        stored=record.stored,
        **_how(args),
        **({} if args.dynamic else _scale_range(stored(program, f"{record.site}_scale"))),
    )


def prepared_row(planned: PlannedSite, seen: SiteStatistics) -> ReportRow:
    """The row of a planned site; scale and amax as far as it was calibrated."""
    return ReportRow(
        layer=planned.site.layer,
        site=planned.key,
        also=planned.keys[1:],
        node=planned.site.node,
        scale_shape=planned.scale_shape,
        amax=seen.amax if seen.tokens else None,
        **_how(planned.args),
        **(_scale_range(seen.qparams(planned)[0]) if seen.tokens and not planned.args.dynamic else {}),
    )


def _how(args: QuantizationArgs) -> dict[str, Any]:
    dtype, strategy = args.summary().removesuffix(" dynamic").rsplit(" ", 1)
    observer = "dynamic" if args.dynamic else args.observer
    return {"dtype": dtype, "strategy": strategy, "bits": args.num_bits, "observer": observer}


def _scale_range(scale: Tensor) -> dict[str, Any]:
    return {"scale_min": float(scale.min()), "scale_max": float(scale.max())}


def with_errors(rows: Sequence[ReportRow], measurement: Measurement) -> list[ReportRow]:
    """The rows with their errors.

    Raises:
        CalibrationError: the measurement is of other sites, or of the same sites quantized otherwise.
    """
    by_site = {row.site: row for row in rows}
    for missing, text in (
        (by_site.keys() - measurement.errors.keys(), "lacks"),
        (measurement.errors.keys() - by_site.keys(), "is of other sites, such as"),
    ):
        if missing:
            raise CalibrationError(f"the measurement {text} {min(missing)}: measure what is reported on")
    for site, row in by_site.items():
        if measurement.quantized_as[site] != row.quantized_as:
            raise CalibrationError(
                f"{site} is {row.quantized_as} here and was measured as {measurement.quantized_as[site]}: measure what "
                "is reported on"
            )
    return [
        replace(row, clipped_percent=e.clipped_percent, sqnr_db=e.sqnr_db, max_abs_error=e.max_abs_error)
        for row, e in ((row, measurement.errors[site]) for site, row in by_site.items())
    ]


def sqnr(row: ReportRow) -> float:
    """What worst-first sorts by, dB."""
    return math.inf if row.sqnr_db is None else row.sqnr_db
