"""Interleaved timing, with a clock that only the timed calls advance."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from bench import models
from tvmfuse import compare


class FakeClock:
    """Time stands still but for `spend`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def spend(self, name: str, seconds: float, value: float = 1.0) -> compare.Runner:
        def call() -> None:
            self.now += seconds
            self.calls.append(name)

        return compare.Runner(call, {"y": np.array([value, 2.0], np.float32)})


def test_ratio_is_the_first_runner_over_the_other() -> None:
    clock = FakeClock()
    rows = compare.compare("m", {"a": clock.spend("a", 1.0), "b": clock.spend("b", 2.0, value=1.5)}, 100, clock)
    assert [(row.runner, row.median_s, row.ratio[1], row.difference) for row in rows] == [
        ("a", pytest.approx(1.0), pytest.approx(1.0), 0.0),
        ("a (A/A)", pytest.approx(1.0), pytest.approx(1.0), 0.0),
        ("b", pytest.approx(2.0), pytest.approx(0.5), 0.25),
    ]


def test_a_round_samples_every_runner_once() -> None:
    clock = FakeClock()
    times = compare.samples({name: clock.spend(name, 1.0).call for name in "abc"}, 60, clock)
    timed = clock.calls[6:]  # two calls each to find the repeats
    assert {len(t) for t in times.values()} == {len(timed) // 6}
    rounds = [timed[i : i + 6 : 2] for i in range(0, len(timed), 6)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1, "the order is random"


def test_short_calls_are_repeated_within_a_sample() -> None:
    clock = FakeClock()
    times = compare.samples({"a": clock.spend("a", 1e-4).call}, 0, clock)
    assert len(times["a"]) == 5
    assert len(clock.calls) == 2 + 5 * (1 + 50)


def test_every_row_of_the_table_has_every_column() -> None:
    row = compare.Row("m", "a", 1e-3, (0.9, 1.0, 1.1), 1e-7, 5)
    assert compare.table([row]).splitlines() == [
        "| model | runner | median ms | first / this | quartiles | difference | rounds |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
        "| m | a | 1 | 1.000 | 0.900 .. 1.100 | 1.0e-07 | 5 |",
    ]


def test_onnxruntime_writes_the_bound_outputs() -> None:
    name = "dfn3_df_dec_s1"
    feeds = models.inputs(name)
    runner = compare.onnxruntime(models.load(name), models.shapes(name), feeds, threads=1)
    first = {key: value.copy() for key, value in runner.outputs.items()}
    feeds["emb"][...] = 0
    runner.call()
    assert compare.difference(first, runner.outputs) > 0


def test_bound_session_writes_outputs_of_its_shapes() -> None:
    class Doubling:
        def get_outputs(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(name="y", shape=(2,), dtype="float32")]

        def bind(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]):
            return lambda: np.multiply(inputs["x"], 2, out=outputs["y"])

    runner = compare.bound(Doubling(), {"x": np.array([1, 2], np.float32)})
    runner.call()
    assert runner.outputs["y"].tolist() == [2.0, 4.0]
