"""A file that is written appears whole, or the old one stays and nothing else is left."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tvmfuse.errors import UsageError
from tvmfuse.files import written


def test_it_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with written(path) as partial:
        partial.write_text("new")
        assert not path.exists()
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.txt", "new")]


@pytest.mark.parametrize("failure", [ValueError("no"), KeyboardInterrupt()])
def test_what_fails_leaves_the_old_one(tmp_path: Path, failure: BaseException) -> None:
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(type(failure)), written(tmp_path / "a.txt") as partial:
        partial.write_text("ne")
        raise failure
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.txt", "old")]


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"can't write .*a\.txt: No such file"), written(tmp_path / "absent" / "a.txt") as partial:
        partial.write_text("new")


def test_what_is_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(UsageError, match="can't write .*: Not a directory"), written(tmp_path / "file" / "a.txt") as partial:
        partial.write_text("new")


def test_a_name_may_be_as_long_as_the_system_allows(tmp_path: Path) -> None:
    with written(tmp_path / ("a" * 255)) as partial:
        partial.write_text("new")
    assert [file.name for file in tmp_path.iterdir()] == ["a" * 255]


def test_what_is_no_file_stays_what_it_is(tmp_path: Path) -> None:
    """To rename a file to /dev/null would end it for the whole machine."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="a device, a pipe or a socket"), written(tmp_path / "pipe") as partial:
        partial.write_text("new")
    assert [(file.name, stat.S_ISFIFO(file.stat().st_mode)) for file in tmp_path.iterdir()] == [("pipe", True)]


def test_a_link_leads_to_the_new_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "link").symlink_to("a.txt")
    with written(tmp_path / "link") as partial:
        partial.write_text("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a.txt").read_text() == "new"
