"""``graphquant backends``: what is installed, and what each backend takes."""

import typer

from graphquant.backends import BACKENDS
from graphquant.backends.table import capability_rows
from graphquant.cli.console import print_json
from graphquant.cli.options import Format, JsonFlag
from graphquant.tables import check_format, render


def backends(json: JsonFlag = False, format: Format = "simple") -> None:
    """List the backends that compile accepts: installed or not, and which settings each takes."""
    check_format(format)
    listed = [
        {
            "backend": backend.name,
            "installed": "no" if backend.missing() else "yes",
            "extra": backend.extra or "",
            "file": backend.suffix,
            "models": ", ".join(backend.dtypes),
            "cache in buffers": "yes" if backend.keeps_state else "refused",
        }
        for backend in BACKENDS.values()
    ]
    if json:
        print_json({"backends": listed, "settings": capability_rows()})
        return
    typer.echo(render(listed, format))
    typer.echo()
    typer.echo(render(capability_rows(), format))
