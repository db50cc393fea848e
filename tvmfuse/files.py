"""A file that is written appears whole or not at all, whoever is interrupted or writes it too."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import UsageError


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A place to write to; `path` appears, whole, when that has ended well. Raises UsageError when it can't be written."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
