"""Bounds by hand."""

import pytest

from tvmfuse.values import Cost, Level, Roofline

LIMITS = Roofline(100.0, (Level("L1", 10, 8.0), Level("L2", 100, 4.0), Level("DRAM", float("inf"), 1.0)))


@pytest.mark.parametrize(
    ("cost", "model_bytes", "seconds"),
    [
        (Cost(flop=1000), 0, 10.0),
        (Cost(activation_bytes=8), 0, 1.0),
        (Cost(activation_bytes=40), 0, 10.0),
        (Cost(activation_bytes=8, constant_bytes=8), 8, 2.0),
        (Cost(activation_bytes=8, constant_bytes=8), 1000, 9.0),  # the rest of the model drives the constants out
        (Cost(constant_bytes=40, passes=3), 1000, 60.0),  # once from DRAM, then twice from the L2
        (Cost(flop=1000, activation_bytes=8), 0, 10.0),
    ],
)
def test_bound(cost, model_bytes, seconds):
    assert LIMITS.bound_s(cost, model_bytes) == pytest.approx(seconds)
