"""A file that is written appears whole or not at all, whoever is interrupted or writes it too."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import UsageError


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A place to write to; `path` appears, whole, when that has ended well. Raises UsageError when it can't be written."""
    check_replaceable(path)
    target = Path(os.path.realpath(path))  # a link stays one
    name = f"{zlib.crc32(target.name.encode()):08x}"  # not the name itself, which may be as long as a file's name can be
    partial = target.with_name(f".{name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        yield partial
        os.replace(partial, target)
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def check_replaceable(path: Path) -> None:
    """Raises UsageError for a folder, and for a device or a pipe, whose place a renamed file takes: for root even that of /dev/null."""
    if path.is_dir():
        raise UsageError(f"can't write {path}: it is a folder; name a file")
    if path.exists() and not path.is_file():
        raise UsageError(f"can't write {path}: it is a device, a pipe or a socket, not a file; name a file")


def check_own(path: Path, head: bytes, kind: str) -> None:
    """Raises UsageError for a file that is there and doesn't begin as those do that would take its place."""
    if path.is_file() and path.stat().st_size:
        with path.open("rb") as file:
            if file.read(len(head)) != head:
                raise UsageError(f"{path} is there and is no {kind}; name another file, or remove it first")
