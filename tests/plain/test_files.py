"""A file that is written appears whole, or the old one stays and nothing else is left."""

from __future__ import annotations

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
