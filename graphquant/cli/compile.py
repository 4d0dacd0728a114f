"""``graphquant compile``: a saved program in, a checked artifact of a backend out."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from graphquant.backends import backend as backend_of
from graphquant.backends import lower
from graphquant.cli.console import Console, print_json
from graphquant.cli.inputs import load_program
from graphquant.cli.options import JsonFlag, ProgramArgument
from graphquant.cli.outputs import check_outputs, check_suffix
from graphquant.errors import LowerError

BackendName = Annotated[str, typer.Option("--backend", metavar="NAME", help="One that backends lists.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", help="Where to save the artifact.", show_default=False),
]
Timeout = Annotated[
    int | None, typer.Option("--timeout", metavar="SECONDS", min=1, help="Give up after so long.", show_default=False)
]
MaxSize = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Largest size to plan memory for (executorch).", show_default=False),
]
Tolerance = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        min=0,
        help="Largest |difference| allowed, relative to the largest |output|.",
        show_default="the backend's, or what roundings make of the program",
    ),
]
Contract = Annotated[
    bool | None,
    typer.Option("--contract", help="A product and its sum as one instruction (inductor).", show_default=False),
]
Check = Annotated[bool, typer.Option("--check/--no-check", help="Run it beside the program, and compare.")]


def compile(
    context: typer.Context,
    file: ProgramArgument,
    backend: BackendName,
    output: Output = None,
    check: Check = True,
    tolerance: Tolerance = None,
    timeout: Timeout = None,
    max_batch: MaxSize = None,
    max_sequence: MaxSize = None,
    contract: Contract = None,
    json: JsonFlag = False,
) -> None:
    """Lower FILE.pt2 to a backend, check the artifact against the program, and say what was really lowered."""
    console: Console = context.obj
    chosen = backend_of(backend)
    output = file.with_name(f"{file.stem}.{chosen.name}{chosen.suffix}") if output is None else output
    check_suffix(output, (chosen.suffix,))
    check_outputs((output,), (file,))
    chosen.require_installed()
    options: dict[str, Any] = {"max_batch": max_batch, "max_sequence": max_sequence, "contract": contract}
    with console.working(f"loading {file}"):
        program = load_program(file)
    start = time.perf_counter()
    checking = " and checking" if check else ""
    with console.working(f"compiling{checking} with {chosen.name}"), _limited(timeout):
        given = {name: value for name, value in options.items() if value is not None}
        lowered = lower(program, chosen.name, check=check, tolerance=tolerance, **given)
    seconds = time.perf_counter() - start
    with console.working(f"saving {output}"):
        lowered.save(output)
    console.written.append(output)
    summary = lowered.summary()
    if json:
        print_json(summary.to_dict() | {"file": str(output), "seconds": seconds, "checked": check})
    else:
        typer.echo(f"{summary}\nsaved {output} after {seconds:.0f} s" + (", checked" if check else ", not checked"))


GRACE = 20
"""Seconds past the time-out after which the process is killed, where a compiler never came back to Python."""
_WATCHDOG = """
import os, sys, time
time.sleep(float(sys.argv[1]))
if os.getppid() == int(sys.argv[2]):
    sys.stderr.write(f"\\nerror: {sys.argv[3]}\\n")
    os.kill(os.getppid(), 9)
"""
"""A process, for a thread would wait for Python's lock, which a compiler may hold. Nothing is half written by then."""


class _TimeIsOver(BaseException):
    """No Exception: compilers catch those, and go on in another way."""


@contextmanager
def _limited(seconds: int | None) -> Iterator[None]:
    """Stop what takes longer: compilers cannot be asked to, but Python between their steps can.

    Raises:
        LowerError: the time is over.
    """
    if seconds is None:
        yield
        return
    late = f"the compiler was not done after {seconds} s: give a longer --timeout, or none"
    over = done = False

    def stop(*_: object) -> None:
        nonlocal over
        if not done:
            over = True
            raise _TimeIsOver

    before = signal.signal(signal.SIGALRM, stop)
    arguments = (str(seconds + GRACE), str(os.getpid()), late)
    watchdog = subprocess.Popen([sys.executable, "-S", "-c", _WATCHDOG, *arguments])
    # Once a second from then on: Python drops what is raised in a destructor or in a callback from C.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        try:
            yield
        finally:
            done = True
    except BaseException:
        if not over:  # else it is the time-out, or what the compiler made of it
            raise
    finally:
        done = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        watchdog.kill()
        watchdog.wait()
    if over:
        raise LowerError(late)
