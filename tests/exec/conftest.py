"""What several tests of builds on this machine start from; `model` is the test file's own."""

from __future__ import annotations

import onnx
import pytest

from tvmfuse import building
from tvmfuse.kernel import grain
from tvmfuse.values import Workload


@pytest.fixture
def plan() -> building.Plan:
    return building.plan_for(None, 1, "always", None)


@pytest.fixture
def workload(model: onnx.ModelProto) -> Workload:
    """Of the model's first site."""
    return building.prepare(model).sites[0].workload


@pytest.fixture
def small_kernels_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """By threads, as only large ones are."""
    monkeypatch.setattr(grain, "REGION_S", -1.0)
