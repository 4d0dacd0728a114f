"""``report``: what was quantized, how, with which scales, and how well; a value with several renderings.

A converted program tells everything itself, also after ``torch.export.save`` and ``load``; a prepared module tells it
from its plan and its observers. Errors of tensors come from ``measure``, predictions from ``evaluate``: what was not
measured stays blank.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from graphquant.errors import ConfigError, ConvertError
from graphquant.evaluation import Evaluation
from graphquant.graph.sites import NearMiss
from graphquant.measuring import Measurement, recorded
from graphquant.passes.prepared import Origin, calibration_of, origin_of
from graphquant.report_rows import ReportRow, prepared_row, program_row, sqnr, with_errors
from graphquant.tables import cell, check_format, paragraph, plain, render


@dataclass(frozen=True, kw_only=True)
class Report:
    """Rows by layer and site; ``coverage`` counts sites; ``tokens`` is how many were measured, None for none."""

    rows: tuple[ReportRow, ...]
    coverage: Mapping[str, int] | None
    near_misses: tuple[NearMiss, ...] = ()
    tokens: int | None = None
    evaluation: Evaluation | None = None

    @property
    def bits(self) -> dict[int, int]:
        """How many tensors there are of each width, in bits."""
        return dict(sorted(Counter(row.bits for row in self.rows).items()))

    @property
    def worst(self) -> ReportRow | None:
        """The row of the lowest SQNR, None without a measurement."""
        return min(self.rows, key=sqnr) if self.tokens is not None else None

    def table(self, fmt: str = "simple", worst_first: bool = False, limit: int | None = None) -> str:
        """The rows as a table of any tabulate format, ``limit`` of them, by site or by SQNR.

        Raises:
            ConfigError: there is no such format, the limit is below 1, or nothing was measured to sort by.
        """
        check_format(fmt)
        if limit is not None and limit < 1:
            raise ConfigError(f"limit {limit} leaves no row to show: expected 1 or more, or None for all")
        if worst_first and self.tokens is None:
            raise ConfigError(
                "worst_first sorts by SQNR, and nothing was measured: report(source, measure(source, batches))"
            )
        rows = sorted(self.rows, key=sqnr) if worst_first else list(self.rows)
        cells = [row.cells() for row in rows[:limit]]
        if all(row.stored is None for row in rows):
            cells = [{name: cell for name, cell in row.items() if name != "stored in"} for row in cells]
        text = render(cells, fmt)
        left_out = len(rows) - len(rows[:limit])
        return text + (paragraph(f"{left_out} of {len(rows)} rows left out", fmt) if left_out else "")

    def summary(self) -> list[str]:
        """Totals, coverage, near misses and evaluation, a line each."""
        widths = ", ".join(f"{count} in {bits} bits" for bits, count in self.bits.items())
        lines = [f"quantized tensors: {len(self.rows)} ({widths})", f"worst SQNR: {self._worst_in_words()}"]
        if any(row.scale_min is None and row.observer != "dynamic" for row in self.rows):
            lines.append("scales: not all known, run calibrate(prepared, batches)")
        if self.coverage is not None:
            counts = self.coverage
            lines.append(
                f"coverage: {counts['sites']} of {counts['found']} sites found are quantized, {counts['ignored']} "
                f"ignored, {counts['near_misses']} near misses"
            )
        lines += [
            f"near miss: {miss.what}{' of ' + miss.path if miss.path else ''}, node {miss.node}: {miss.reason}"
            for miss in self.near_misses
        ]
        return lines + ([] if self.evaluation is None else self.evaluation.lines())

    def _worst_in_words(self) -> str:
        if self.worst is None:
            return "not measured, see measure(source, batches)"
        return f"{cell(self.worst.sqnr_db)} dB at {self.worst.site} ({self.tokens} tokens measured)"

    def to_dict(self) -> dict[str, Any]:
        """JSON form; figures that are infinite (the SQNR of a site without error) or not known are None."""
        worst = self.worst
        data: dict[str, Any] = plain(
            {
                "rows": [asdict(row) for row in self.rows],
                "totals": {
                    "tensors": len(self.rows),
                    "bits": self.bits,
                    "tokens_measured": self.tokens,
                    "worst_sqnr_db": None if worst is None else worst.sqnr_db,
                    "worst_site": None if worst is None else worst.site,
                },
                "coverage": self.coverage,
                "near_misses": [asdict(miss) for miss in self.near_misses],
                "evaluation": None if self.evaluation is None else self.evaluation.to_dict(),
            }
        )
        return data

    def to_json(self) -> str:
        """``to_dict`` as strict JSON: no Infinity, no NaN."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def to_markdown(self) -> str:
        """Table and summary in GitHub's Markdown."""
        return self.table("github") + "\n\n" + "\n".join(f"- {line}" for line in self.summary()) + "\n"

    def __str__(self) -> str:
        return self.table() + "\n\n" + "\n".join(self.summary())


def report(
    source: ExportedProgram | nn.Module, measurement: Measurement | None = None, evaluation: Evaluation | None = None
) -> Report:
    """One row for every quantized tensor of a converted program, or of a prepared module.

    ``measurement`` is ``measure(source, batches)``; without it clipping, SQNR and error stay blank.

    Raises:
        ConvertError: the source was made neither by ``convert`` nor by ``prepare``.
        CalibrationError: the measurement is of other sites, or of the same sites quantized otherwise.
    """
    if isinstance(source, ExportedProgram):
        found = recorded(source)
        rows = [program_row(source, node.name, record) for node, record in found]
        coverage = next((record.coverage for _, record in found if record.coverage is not None), None)
        near_misses: tuple[NearMiss, ...] = ()
    else:
        origin = _origin(source)
        calibration = calibration_of(source)
        rows = [prepared_row(planned, calibration.statistics(planned)) for planned in origin.plan]
        coverage, near_misses = origin.plan.coverage(), origin.sites.near_misses
    rows.sort(key=lambda row: row.order)
    return Report(
        rows=tuple(rows if measurement is None else with_errors(rows, measurement)),
        coverage=coverage,
        near_misses=near_misses,
        tokens=None if measurement is None else measurement.tokens,
        evaluation=evaluation,
    )


def _origin(source: nn.Module) -> Origin:
    try:
        return origin_of(source)
    except ConvertError as error:
        raise ConvertError(
            f"report takes a program made by convert or a module made by prepare, found {type(source).__name__}"
        ) from error
