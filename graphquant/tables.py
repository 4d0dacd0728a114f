"""Tables of figures: four significant digits, blank where there is none, in any format of tabulate."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate, tabulate_formats

from graphquant.config.reading import did_you_mean
from graphquant.errors import ConfigError


def check_format(fmt: str) -> None:
    """Refuse a format that tabulate does not have.

    Raises:
        ConfigError: listing all formats.
    """
    if fmt not in tabulate_formats:
        raise ConfigError(
            f"unknown table format {fmt!r}{did_you_mean(fmt, tabulate_formats)} (known: {', '.join(tabulate_formats)})"
        )


def cell(value: object, digits: int = 4) -> str:
    """A value in a table: ``None`` is blank, a float has so many significant digits."""
    if value is None:
        return ""
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def render(rows: Sequence[Mapping[str, Any]], fmt: str, digits: Mapping[str, int] | None = None) -> str:
    """Rows (one at least) as a table, columns of numbers to the right; ``digits`` of a column, where not 4.

    Raises:
        ConfigError: there is no such format.
    """
    check_format(fmt)
    numeric = [all(isinstance(row[name], int | float | None) for row in rows) for name in rows[0]]
    return tabulate(
        [[cell(value, (digits or {}).get(name, 4)) for name, value in row.items()] for row in rows],
        headers=list(rows[0]),
        tablefmt=fmt,
        disable_numparse=True,
        colalign=["right" if number else "left" for number in numeric],
    )


def paragraph(text: str, fmt: str) -> str:
    """A line of text below a table: its own paragraph, marked up where the format is HTML."""
    return f"\n<p>{html.escape(text)}</p>" if fmt in ("html", "unsafehtml") else f"\n\n{text}"


def plain(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become None, whatever they are nested in."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and value - value != 0 else value
