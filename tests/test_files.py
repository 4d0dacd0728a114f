"""Files appear whole or not at all."""

from pathlib import Path

import pytest

from graphquant.errors import OutputError
from graphquant.files import check_writable, written_whole


def test_a_file_appears_under_its_name_only_when_done(tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    with written_whole(target) as temporary:
        temporary.write_text("new")
        assert not target.exists()
        assert temporary.parent == tmp_path
    assert target.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_an_interruption_leaves_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "out.txt"
    target.write_text("old")

    def interrupted() -> None:
        with written_whole(target) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(OutputError if error is OSError else error):
        interrupted()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


def test_the_file_can_be_read_by_others(tmp_path: Path) -> None:
    with written_whole(tmp_path / "out.txt") as temporary:
        temporary.write_text("x")
    (tmp_path / "plain.txt").write_text("x")
    assert (tmp_path / "out.txt").stat().st_mode == (tmp_path / "plain.txt").stat().st_mode


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"it is a directory; give the path of a file"):
        check_writable(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"there is no directory .*none; create it first"):
        check_writable(tmp_path / "none" / "out.txt")


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="there is no directory"):
        check_writable(tmp_path / "file" / "out.txt")
