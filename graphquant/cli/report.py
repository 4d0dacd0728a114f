"""``graphquant report``: what a saved program says about its quantization."""

from typing import Annotated

import typer

from graphquant.cli.console import Console
from graphquant.cli.inputs import Source, Texts, batches_of, check_program
from graphquant.cli.options import (
    BatchSize,
    Data,
    Format,
    JsonFlag,
    Length,
    ProgramArgument,
    Samples,
    Tokenizer,
    WorstFirst,
)
from graphquant.cli.outputs import report_text
from graphquant.measuring import measure
from graphquant.report import report as report_of
from graphquant.tables import check_format


def report(
    context: typer.Context,
    file: ProgramArgument,
    tokenizer: Tokenizer = None,
    data: Data = None,
    samples: Samples = 8,
    length: Length = 256,
    batch_size: BatchSize = 1,
    worst_first: WorstFirst = False,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="N", min=1, help="Show N rows.", show_default=False)
    ] = None,
    json: JsonFlag = False,
    format: Format = "simple",
) -> None:
    """Show every quantized tensor of FILE.pt2; with --tokenizer, also its error, measured on text."""
    console: Console = context.obj
    check_format(format)
    if tokenizer is None and (worst_first or data is not None):
        option = "--worst-first" if worst_first else "--data"
        raise typer.BadParameter("it needs a measurement: name the model with --tokenizer", param_hint=option)
    check_program(file)
    texts = None if tokenizer is None else Texts.read(data, samples, length, batch_size)
    source = Source.load(str(file), tokenizer, "float32", console)
    program = source.program(console)
    result = report_of(program)
    if texts is not None:
        _, rows = source.rows(texts)
        batches = batches_of(rows, batch_size, {source.name: program})
        console.stage(f"measuring on {len(rows)} rows of {length} tokens …")
        result = report_of(program, measure(program, batches, progress=console.progress))
    typer.echo(result.to_json() if json else report_text(result, format, worst_first, limit))
