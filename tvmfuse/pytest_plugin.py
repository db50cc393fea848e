"""The fixture `tvmfuse_check`: what `tvmfuse check` does, as an assertion in a user's tests.

    def test_model_stays_fast(tvmfuse_check):
        tvmfuse_check("enc.onnx", "enc.decisions.json", shapes={"S": 1})

`pytest --tvmfuse-write` records the files anew, `--tvmfuse-no-speed` leaves the speed out, as on a machine that others use too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tvmfuse")
    group.addoption("--tvmfuse-write", action="store_true", help="write the files of decisions that tvmfuse_check compares with")
    group.addoption("--tvmfuse-no-speed", action="store_true", help="let tvmfuse_check leave the speed out")


@pytest.fixture
def tvmfuse_check(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`tvmfuse_check(model, against, shapes=..., threads=..., tolerance=..., speed=...)` fails the test with the differences."""
    from .check import check

    def run(model: Any, against: str | os.PathLike[str], *, speed: bool = True, **options: Any) -> None:
        speed = speed and not request.config.getoption("--tvmfuse-no-speed")
        judgement = check(model, against, write=request.config.getoption("--tvmfuse-write"), speed=speed, **options)
        if judgement.differences:
            pytest.fail("\n".join([f"{against}:", *judgement.differences, *judgement.notes]), pytrace=False)

    return run
