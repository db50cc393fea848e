"""What every test relies on: TVM's threads, hypothesis' profile, each folder's marker, and how the command line is called."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

# TVM reads both before its first parallel call. Two threads, so that independence of the thread count means something;
# unbound, because workers bound to cores fight with the test process beside them.
os.environ.setdefault("TVM_NUM_THREADS", "2")
os.environ.setdefault("TVM_BIND_THREADS", "0")
os.environ["TVMFUSE_CACHE"] = "off"
# What a build chooses here must not depend on what was tuned on this machine.
os.environ["TVMFUSE_LOGS"] = tempfile.mkdtemp(prefix="tvmfuse-tests-")

import pytest
from hypothesis import settings

from tests.invoking import Done, Invoke

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# A shell ignores SIGINT for what it starts in the background, and so would all commands that are interrupted here.
signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ["TVMFUSE_LOGS"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(item.path.relative_to(TESTS).parts[0])


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Invoke:
    from tvmfuse import cli

    def call(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["tvmfuse", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return Done(stop.value.code or 0, *capfd.readouterr())  # type: ignore[arg-type]

    return call
