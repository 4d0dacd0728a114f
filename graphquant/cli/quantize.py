"""``graphquant quantize``: model in, quantized ``ExportedProgram`` out, and what that cost.

Options, files and configuration are checked before the model is loaded, the plan before calibration; files are written
last, and all at once.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from torch.export import ExportedProgram

from graphquant.calibration import Calibration
from graphquant.cli.console import Console
from graphquant.cli.inputs import Batches, Source, Texts, batches_of, config_of
from graphquant.cli.options import (
    BatchSize,
    Data,
    Dialect,
    DType,
    Format,
    JsonFlag,
    Length,
    ModelArgument,
    PresetName,
    ProgramOutput,
    Recipe,
    Samples,
    Tokenizer,
    WorstFirst,
    file_option,
)
from graphquant.cli.outputs import (
    REPORT_SUFFIXES,
    check_outputs,
    check_suffix,
    report_text,
    save_program,
    write_all,
    write_report,
)
from graphquant.config import QuantizationConfig
from graphquant.errors import ConvertError
from graphquant.evaluation import evaluate
from graphquant.graph import find_attention
from graphquant.loops import calibrate
from graphquant.measuring import measure
from graphquant.passes import convert, prepare
from graphquant.plan import make_plan
from graphquant.records import records
from graphquant.report import Report, report
from graphquant.tables import check_format

SaveCalibration = Annotated[Path | None, file_option("--save-calibration", "Also save the statistics.")]
SavedCalibration = Annotated[Path | None, file_option("--calibration", "Reuse saved statistics: no pass over data.")]
Measured = Annotated[
    bool | None,
    typer.Option(
        "--measure/--no-measure",
        help="Measure the error of every tensor.  [default: measure, unless with --calibration]",
        show_default=False,
    ),
]
Evaluated = Annotated[bool, typer.Option("--evaluate", help="Also perplexity, KL divergence and top-1 agreement.")]
ReportFile = Annotated[Path | None, file_option("--report", "Also save the report (.md, .json, .txt, .html).")]


def quantize(
    context: typer.Context,
    model: ModelArgument,
    output: ProgramOutput,
    preset_name: PresetName = None,
    recipe: Recipe = None,
    data: Data = None,
    samples: Samples = 8,
    length: Length = 256,
    batch_size: BatchSize = 1,
    tokenizer: Tokenizer = None,
    dialect: Dialect = "pt2e",
    save_calibration: SaveCalibration = None,
    calibration: SavedCalibration = None,
    measured: Measured = None,
    evaluated: Evaluated = False,
    report_file: ReportFile = None,
    worst_first: WorstFirst = False,
    dtype: DType = "float32",
    json: JsonFlag = False,
    format: Format = "simple",
) -> None:
    """Quantize MODEL and save it as a program of torch.export."""
    console: Console = context.obj
    measured = calibration is None if measured is None else measured
    if worst_first and not measured:
        raise typer.BadParameter("it needs a measurement: add --measure", param_hint="--worst-first")
    _check_calibration_options(calibration, save_calibration, None if measured or evaluated else data)
    check_format(format)
    check_suffix(output, (".pt2",))
    check_suffix(report_file, REPORT_SUFFIXES)
    check_outputs((output, save_calibration, report_file), (Path(model), data, recipe, calibration))
    config = config_of(preset_name, recipe)
    known = None if calibration is None else Calibration.load(calibration)
    texts = Texts.read(data, samples, length, batch_size) if known is None or measured or evaluated else None
    run = _Run(Source.load(model, tokenizer, dtype, console), config, texts, console)
    statistics = run.calibrate() if known is None else known
    with console.working("converting"):
        quantized = convert(run.program, statistics, config, dialect=dialect)
    result = run.judge(quantized, measured, evaluated)
    files: dict[Path | None, Callable[[Path], object]] = {
        output: partial(save_program, quantized),
        save_calibration: statistics.save,
        report_file: partial(write_report, result),
    }
    write_all({path: write for path, write in files.items() if path is not None}, console)
    typer.echo(result.to_json() if json else report_text(result, format, worst_first))


class _Run:
    """A captured model, planned, with the batches that it is calibrated on and those that it is judged by."""

    def __init__(self, source: Source, config: QuantizationConfig, texts: Texts | None, console: Console) -> None:
        self.console, self.config = console, config
        rows = None if texts is None else source.rows(texts)
        self.program = source.program(console)
        if any(records(self.program)):
            raise ConvertError(f"{source.name} is quantized already: give the model or program that it was made of")
        counts = make_plan(find_attention(self.program), config).coverage()
        misses = f", {counts['near_misses']} near misses (see graphquant sites)" if counts["near_misses"] else ""
        console.stage(f"planned {counts['tensors']} tensors, {counts['sites']} of {counts['found']} sites{misses}")
        self.calibration: Batches = []
        self.evaluation: Batches = []
        if texts is not None and rows is not None:
            self.calibration, self.evaluation = (
                batches_of(part, texts.batch_size, {source.name: self.program}) for part in rows
            )

    def calibrate(self) -> Calibration:
        """What the planned sites see of the calibration rows."""
        prepared = prepare(self.program, self.config)
        self.console.stage(f"calibrating on {_size(self.calibration)} …")
        return calibrate(prepared, self.calibration, progress=self.console.progress)

    def judge(self, quantized: ExportedProgram, measured: bool, evaluated: bool) -> Report:
        """The report, with what is wanted of measurement and evaluation."""
        measurement = evaluation = None
        if measured:
            self.console.stage(f"measuring on {_size(self.evaluation)} …")
            measurement = measure(quantized, self.evaluation, progress=self.console.progress)
        if evaluated:
            self.console.stage(f"evaluating on {_size(self.evaluation)} …")
            models = {"original": self.program, "quantized": quantized}
            evaluation = evaluate(models, self.evaluation, progress=self.console.progress)
        return report(quantized, measurement, evaluation)


def _check_calibration_options(calibration: Path | None, save_calibration: Path | None, unread: Path | None) -> None:
    """Refuse options that reusing a calibration leaves without effect."""
    if calibration is None:
        return
    if save_calibration is not None:
        raise typer.BadParameter("with --calibration there is nothing new to save", param_hint="--save-calibration")
    if unread is not None:
        raise typer.BadParameter(
            "with --calibration no data is read, unless --measure or --evaluate asks for it", param_hint="--data"
        )


def _size(batches: Batches) -> str:
    return f"{sum(len(batch['input_ids']) for batch in batches)} rows of {batches[0]['input_ids'].shape[1]} tokens"
