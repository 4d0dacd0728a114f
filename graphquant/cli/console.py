"""What every command shares: stages on standard error, and failures as one line."""

import json
import logging
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from graphquant.errors import GraphQuantError, first_line
from graphquant.progress import working
from graphquant.tables import plain

GENERAL_OPTIONS = ("--debug", "--quiet")


@dataclass
class Console:
    """How much to say, and which files are written by now; ``context.obj`` of every command."""

    debug: bool = False
    quiet: bool = False
    written: list[Path] = field(default_factory=list)

    @property
    def progress(self) -> bool:
        """Whether the library's progress bars are wanted."""
        return not self.quiet

    def stage(self, text: str) -> None:
        """Say what is about to be done, or was."""
        if not self.quiet:
            typer.echo(text, err=True)

    @contextmanager
    def working(self, text: str) -> Iterator[None]:
        """Say what is being done, with a running clock if it takes long and someone is watching."""
        self.stage(f"{text} …")
        with working(text, show=self.progress and sys.stderr.isatty()):
            yield

    def fail(self, message: str, code: int = 1) -> NoReturn:
        """End the command with one line, and under ``--debug`` the traceback before it."""
        if self.debug:
            typer.echo(traceback.format_exc(), err=True)
        typer.echo(f"error: {' '.join(message.split())}", err=True)
        raise typer.Exit(code) from None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn every exception, but those that are typer's own, into one line and an exit code.

        Raises:
            typer.Exit: with 130 after an interruption, 1 after any other failure.
        """
        try:
            with warnings.catch_warnings(), self._logs():
                if not self.debug:
                    warnings.simplefilter("ignore")
                yield
        except (typer.Exit, typer.Abort, typer.BadParameter, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            done = f"{', '.join(map(str, self.written))} had been written" if self.written else "nothing was written"
            self.fail(f"interrupted; {done}", 130)
        except GraphQuantError as error:
            self.fail(str(error))
        except OSError as error:
            self.fail(str(error) or type(error).__name__)
        except Exception as error:  # torch raises every kind, with pages of text
            self.fail(f"{type(error).__name__}: {first_line(error)}; run with --debug for the traceback")

    @contextmanager
    def _logs(self) -> Iterator[None]:
        """Silence logging: torch.export.load, for one, logs a traceback before it raises."""
        before = logging.root.manager.disable
        if not self.debug:
            logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(before)


class GuardedCommand(TyperCommand):
    """A command whose function runs under ``Console.guarded``; usage errors come before it and stay typer's."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command's function."""
        with ctx.obj.guarded():
            return super().invoke(ctx)


class LenientGroup(TyperGroup):
    """A group whose own flags may also stand after the command's name, where people add ``--debug``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, the general flags first."""
        general = [arg for arg in args if arg in GENERAL_OPTIONS]
        return super().parse_args(ctx, general + [arg for arg in args if arg not in GENERAL_OPTIONS])


def print_json(value: object) -> None:
    """Print strict JSON: figures that are infinite or NaN become null."""
    typer.echo(json.dumps(plain(value), indent=2, allow_nan=False))
