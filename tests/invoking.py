"""The command line, called in this process: the fixture `invoke` of conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Done(NamedTuple):
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


Invoke = Callable[..., Done]
"""invoke("explain", path, "--json") takes what would stand behind `tvmfuse`."""
