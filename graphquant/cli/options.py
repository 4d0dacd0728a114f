"""The options that several commands have, as types."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def file_option(flag: str, text: str) -> Any:
    """An option that names a file."""
    return typer.Option(flag, metavar="FILE", help=text, show_default=False)


DType = Annotated[
    Literal["float32", "bfloat16", "float16"], typer.Option("--dtype", help="The type to load the weights as.")
]
ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A hub id, a folder in Hugging Face format, a .gguf file, smollm2, or a .pt2 file of torch.export.save.",
        show_default=False,
    ),
]
ProgramArgument = Annotated[Path, typer.Argument(metavar="FILE.pt2", help="What quantize wrote.", show_default=False)]
ProgramOutput = Annotated[Path, file_option("--output", "Where to save the quantized program (.pt2).")]
PresetName = Annotated[
    str | None, typer.Option("--preset", metavar="NAME", help="One that presets lists.", show_default=False)
]
Recipe = Annotated[Path | None, file_option("--recipe", "A recipe (.yaml), or a configuration (.json).")]
Dialect = Annotated[Literal["pt2e", "aten"], typer.Option("--dialect", help="Operators to write into the graph.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")]
Format = Annotated[
    str, typer.Option("--format", metavar="FMT", help="Table format of tabulate: simple, github, html, tsv, …")
]
WorstFirst = Annotated[bool, typer.Option("--worst-first", help="Order by SQNR; needs a measurement.")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="FILE",
        help="Text: a .txt file, or .jsonl with a field 'text'.  [default: Python's help topics]",
        show_default=False,
    ),
]
Samples = Annotated[
    int, typer.Option("--samples", min=1, help="Rows to calibrate on, and as many others to measure and evaluate on.")
]
Length = Annotated[int, typer.Option("--length", min=1, help="Tokens in a row.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Rows at a time.")]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="MODEL",
        help="The model whose tokenizer reads the text; a .pt2 file has none.",
        show_default=False,
    ),
]
