"""``graphquant sites``: what the attention finder sees."""

from dataclasses import asdict
from typing import Annotated

import typer

from graphquant.cli.console import Console, print_json
from graphquant.cli.inputs import Source
from graphquant.cli.options import DType, Format, JsonFlag, ModelArgument
from graphquant.graph import find_attention
from graphquant.tables import check_format


def sites(
    context: typer.Context,
    model: ModelArgument,
    decompose: Annotated[
        bool, typer.Option("--decompose", help="Look at the graph after run_decompositions() to core ATen.")
    ] = False,
    dtype: DType = "float32",
    json: JsonFlag = False,
    format: Format = "simple",
) -> None:
    """List the attention sites of MODEL, and the near misses with their reasons."""
    console: Console = context.obj
    check_format(format)
    program = Source.load(model, None, dtype, console).program(console)
    if decompose:
        with console.working("decomposing"):
            program = program.run_decompositions()
    found = find_attention(program)
    if not json:
        typer.echo(found.table(format).strip())
        return
    layers = [
        {
            "index": layer.index,
            "path": layer.path,
            "module_class": layer.module_class,
            "core": layer.core,
            "spelling": layer.spelling,
        }
        for layer in found.layers
    ]
    print_json({"layers": layers, "sites": found.rows(), "near_misses": [asdict(miss) for miss in found.near_misses]})
