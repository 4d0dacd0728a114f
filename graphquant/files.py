"""Writing files so that an interruption leaves the old file or the new one, never a half."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphquant.errors import OutputError


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` that is renamed to it on success and removed on any failure.

    Raises:
        OutputError: the directory is missing or cannot be written, or the path is a directory.
    """
    target = Path(path)
    check_writable(target)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=target.suffix, dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())  # mkstemp's 0600 would make the result unreadable to others
        os.replace(temporary, target)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: str | Path) -> None:
    """Refuse a path that cannot become a file, before any work is done for it.

    Raises:
        OutputError: the directory is missing or cannot be written, or the path is a directory.
    """
    target = Path(path)
    parent = target.parent
    if target.is_dir():
        raise OutputError(f"cannot write {target}: it is a directory; give the path of a file")
    if not parent.is_dir():
        raise OutputError(f"cannot write {target}: there is no directory {parent}; create it first")
    try:
        with tempfile.NamedTemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror or error}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
