"""A document in which an example's table stands between two markers."""

from pathlib import Path

from graphquant.files import written_whole

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
WRITE_HELP = f"replace what stands between {BEGIN} and {END}"


def has_markers(path: Path) -> bool:
    """Whether a table can be put into the document."""
    return BEGIN in path.read_text(encoding="utf-8")


def put_between_markers(path: Path, text: str) -> None:
    """Replace what stands between the markers, in the whole file or not at all."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    with written_whole(path) as temporary:
        temporary.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
