"""``graphquant presets``: the configurations that have names."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from graphquant.cli.console import print_json
from graphquant.cli.options import Format, JsonFlag
from graphquant.config import PRESETS, preset
from graphquant.tables import render


def presets(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print this one.", show_default=False)] = None,
    json: JsonFlag = False,
    format: Format = "simple",
) -> None:
    """List the presets, or print preset NAME as a recipe to start from."""
    if name is None:
        rows = [{"preset": key, "description": entry.description} for key, entry in PRESETS.items()]
        if json:
            print_json(rows)
        else:
            typer.echo(render(rows, format))
        return
    config = preset(name)
    if json:
        print_json(config.to_dict())
        return
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.yaml")
        config.to_recipe(recipe)
        typer.echo(recipe.read_text(encoding="utf-8"), nl=False)
