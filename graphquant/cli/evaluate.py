"""``graphquant evaluate``: what quantization does to a model's predictions."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from graphquant.cli.console import Console, print_json
from graphquant.cli.inputs import Source, Texts, batches_of, check_same_model, load_program, text_inputs
from graphquant.cli.options import (
    BatchSize,
    Data,
    DType,
    Format,
    JsonFlag,
    Length,
    ModelArgument,
    Samples,
    Tokenizer,
)
from graphquant.evaluation import evaluate as evaluate_models
from graphquant.tables import check_format


def evaluate(
    context: typer.Context,
    model: ModelArgument,
    files: Annotated[list[Path], typer.Argument(metavar="FILE.pt2", help="What quantize wrote.", show_default=False)],
    tokenizer: Tokenizer = None,
    data: Data = None,
    samples: Samples = 8,
    length: Length = 256,
    batch_size: BatchSize = 1,
    dtype: DType = "float32",
    json: JsonFlag = False,
    format: Format = "simple",
) -> None:
    """Compare MODEL and quantized programs: perplexity, KL divergence, top-1 agreement.

    Give the --data, --samples and --length of quantize, and no row is one of those that it calibrated on.
    """
    console: Console = context.obj
    check_format(format)
    texts = Texts.read(data, samples, length, batch_size)
    programs = {name: load_program(path) for name, path in zip(names_of(files), files, strict=True)}
    for name, program in programs.items():
        text_inputs(program, name)
    source = Source.load(model, tokenizer, dtype, console)
    _, rows = source.rows(texts)
    original = source.program(console)
    for name, program in programs.items():
        check_same_model(original, program, name)
    models = {"original": original, **programs}
    batches = batches_of(rows, batch_size, models)
    console.stage(f"evaluating on {len(rows)} rows of {length} tokens …")
    result = evaluate_models(models, batches, progress=console.progress)
    if json:
        print_json(result.to_dict())
    else:
        typer.echo(result.table(format))


def names_of(files: list[Path]) -> list[str]:
    """Short names for tables: the files' stems, or their paths where a stem is not unique."""
    counts = Counter(path.stem for path in files)
    names = [path.stem if counts[path.stem] == 1 and path.stem != "original" else str(path) for path in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise typer.BadParameter(f"{twice} is given twice", param_hint="FILE.pt2")
    return names
