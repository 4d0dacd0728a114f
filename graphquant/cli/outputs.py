"""What commands write: files, all of them or none, and reports in any form."""

import io
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch.export import ExportedProgram

from graphquant.cli.console import Console
from graphquant.errors import OutputError
from graphquant.files import check_writable, written_whole
from graphquant.report import Report
from graphquant.tables import paragraph

REPORT_SUFFIXES = (".md", ".json", ".txt", ".html")


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path | None]) -> None:
    """Refuse, before any work, outputs that cannot be written, or that would overwrite an input or each other.

    Raises:
        OutputError: naming the path.
    """
    read = {path.resolve() for path in inputs if path is not None}
    seen: set[Path] = set()
    for path in outputs:
        if path is None:
            continue
        if path.resolve() in read:
            raise OutputError(f"cannot write {path}: it is an input of this command; give another path")
        if path.resolve() in seen:
            raise OutputError(f"cannot write {path}: another output has the same path; give another")
        seen.add(path.resolve())
        check_writable(path)


def check_suffix(path: Path | None, suffixes: tuple[str, ...]) -> None:
    """Refuse an output whose name does not end in one of ``suffixes``.

    Raises:
        OutputError: saying which are known.
    """
    if path is not None and path.suffix.lower() not in suffixes:
        raise OutputError(f"cannot write {path}: expected a name that ends in {' or '.join(suffixes)}")


def write_all(files: Mapping[Path, Callable[[Path], object]], console: Console) -> None:
    """Write every file under a temporary name, and rename them when all are written.

    Raises:
        OutputError: one cannot be written; then none is.
    """
    with ExitStack() as stack:
        for path, write in files.items():
            temporary = stack.enter_context(written_whole(path))
            with console.working(f"saving {path}"):
                write(temporary)
    console.written += files


def save_program(program: ExportedProgram, path: Path) -> None:
    """``torch.export.save``, except that a full disk is an error, and that the file's bytes do not hold its name.

    Raises:
        OSError: what the file's writing raised.
    """
    with path.open("wb") as file:
        sink = _Sink(file)
        try:
            torch.export.save(program, cast(IO[bytes], sink))
        finally:
            if sink.error is not None:
                raise sink.error


class _Sink(io.RawIOBase):
    """A file to write to that keeps its first failure to itself: torch's C++ writer ends the process when one fails."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: BaseException | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        """Claimed, as torch asks for it; it only ever goes back to the start when all is written."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return 0

    def write(self, data: Any) -> int:
        """Write all of ``data``, or after a failure none of it."""
        try:
            if self.error is None:
                self._file.write(data)
        except BaseException as error:  # Ctrl-C too
            self.error = error
        return len(data)


def report_text(report: Report, fmt: str, worst_first: bool = False, limit: int | None = None) -> str:
    """The table of a report, and its summary below."""
    table = report.table(fmt, worst_first, limit)
    if fmt in ("html", "unsafehtml"):
        return table + "".join(paragraph(line, fmt) for line in report.summary())
    return table + "\n\n" + "\n".join(report.summary())


def write_report(report: Report, path: Path) -> None:
    """Write a report in the form that the path's ending names."""
    match path.suffix.lower():
        case ".json":
            text = report.to_json() + "\n"
        case ".md":
            text = report.to_markdown()
        case ".html":
            head = '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>graphquant report</title>\n'
            text = f"{head}{report_text(report, 'html')}\n</html>\n"
        case _:
            text = report_text(report, "simple") + "\n"
    path.write_text(text, encoding="utf-8")
