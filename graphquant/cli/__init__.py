"""The command ``graphquant``: options in, library calls, tables or JSON out; one file a command.

Invariants: standard output carries the result and nothing else; a failure is one line ``error: …`` on standard error;
files are written whole, after everything that can fail.
"""

import signal
from importlib.metadata import version
from typing import Annotated

import typer

from graphquant.cli import backends, compile, decode, evaluate, presets, quantize, report, sites
from graphquant.cli.console import Console, GuardedCommand, LenientGroup

app = typer.Typer(
    cls=LenientGroup,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes and colours do not survive a pipe or a narrow terminal
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"graphquant {version('graphquant')}")
        raise typer.Exit


@app.callback()
def start(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks, warnings and logs.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no stages and no progress bars.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Quantize the attention and the KV cache of a Llama-style model, as a pass over its torch.export graph."""
    context.obj = Console(debug=debug, quiet=quiet)


COMMANDS = (
    sites.sites,
    quantize.quantize,
    decode.decode,
    report.report,
    evaluate.evaluate,
    compile.compile,
    backends.backends,
    presets.presets,
)
for command in COMMANDS:
    app.command(cls=GuardedCommand)(command)


def main() -> None:
    """Run the command line, and exit."""
    # kill's default ends the process on the spot, and would leave a temporary file beside the output.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app(prog_name="graphquant")
