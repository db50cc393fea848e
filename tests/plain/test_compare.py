"""Interleaved timing, with a clock that only the timed calls advance."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from bench import plot, targets
from tvmfuse import compare
from tvmfuse.compare import Ratio, Row


class FakeClock:
    """Time stands still but for `spend`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def spend(self, name: str, seconds: float) -> compare.Timer:
        def call() -> None:
            self.now += seconds
            self.calls.append(name)

        return compare.timer(call, self)


def test_a_round_samples_every_runner_once() -> None:
    clock = FakeClock()
    times = compare.interleave({name: clock.spend(name, 1.0) for name in "abc"}, 60, clock)
    timed = clock.calls[3:]  # one each to find the repeats
    assert {len(t.samples) for t in times.values()} == {len(timed) // 6}
    rounds = [timed[i : i + 6 : 2] for i in range(0, len(timed), 6)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert len({tuple(r) for r in rounds}) > 1, "the order is random"


def test_short_calls_are_repeated_within_a_sample_after_a_warm_one() -> None:
    clock = FakeClock()
    times = compare.interleave({"a": clock.spend("a", 1e-4)}, 0, clock)
    assert len(times["a"].samples) == compare.MIN_ROUNDS
    assert len(times["a"].calls) == compare.MIN_ROUNDS * 50
    assert len(clock.calls) == 1 + (1 + compare.MIN_ROUNDS) * 51


def test_what_is_far_slower_than_the_first_is_timed_once() -> None:
    clock = FakeClock()
    times = compare.interleave({"a": clock.spend("a", 0.5), "b": clock.spend("b", 3.0)}, 30, clock)
    assert times["b"].samples == (3.0,)
    assert clock.calls.count("b") == 1
    assert compare.ratio(times["a"].samples, times["b"].samples) == Ratio(pytest.approx(1 / 6), (1 / 6, 1 / 6), (1 / 6, 1 / 6))


def test_sessions_of_one_process_are_all_in_every_round() -> None:
    clock = FakeClock()

    def spend(seconds: float):
        return lambda: clock.spend("x", seconds)(1, False)

    rows = compare.compare("m", {"a": spend(0.2), "b": spend(2.0)}, 20, clock, threads=2)
    assert [(row.runner, row.threads, row.ratio and row.ratio.median) for row in rows] == [
        ("a", 2, pytest.approx(1.0)),
        ("a (A/A)", 2, pytest.approx(1.0)),
        ("b", 2, pytest.approx(0.1)),
    ]
    assert {len(row.samples_s) for row in rows} == {len(rows[0].samples_s)} and len(rows[0].samples_s) > 1


def test_one_slow_first_call_does_not_make_a_runner_slow() -> None:
    clock = FakeClock()
    seconds = iter([0.05, 0.04, 0.04])

    def call() -> None:
        clock.now += next(seconds, 0.001)

    times = compare.interleave({"a": clock.spend("a", 0.001), "b": compare.timer(call, clock)}, 0, clock)
    assert len(times["b"].samples) == compare.MIN_ROUNDS


def test_ratio_pairs_the_rounds() -> None:
    assert compare.ratio((1.0, 2.0, 3.0), (2.0, 4.0, 6.0)).median == 0.5
    wide = compare.ratio(tuple(map(float, range(1, 10))), (1.0,) * 9)
    assert (wide.median, wide.interval, wide.quartiles) == (5.0, (2.0, 8.0), (3.0, 7.0))


@pytest.mark.parametrize("count", [3, 5, 6, 8, 9, 30, 101])
def test_the_interval_holds_the_median_as_often_as_stated(count: int) -> None:
    rank = compare.median_rank(count)

    def missed(k: int) -> float:
        return 2 * sum(math.comb(count, i) for i in range(k + 1)) * 0.5**count

    assert missed(rank + 1) > 1 - compare.CONFIDENCE, "no narrower one does"
    assert rank == 0 or missed(rank) <= 1 - compare.CONFIDENCE


def test_difference_is_relative_to_the_exact_outputs() -> None:
    exact = {"y": np.array([1.0, -4.0]), "z": np.zeros(0)}
    assert compare.difference(exact, {"y": np.array([1.0, -3.0]), "z": np.zeros(0)}) == 0.25
    assert compare.difference(exact, {"y": np.array([1.0, np.nan]), "z": np.zeros(0)}) == math.inf
    assert compare.difference(exact, {"y": np.zeros(3), "z": np.zeros(0)}) == math.inf
    assert compare.difference(exact, {"z": np.zeros(0)}) == math.inf


def timed(runner: str, seconds: float, threads: int = 1) -> Row:
    return Row("squeezenet", runner, threads, seconds, Ratio(1.0, (0.9, 1.1), (0.95, 1.05)), {}, 1e-7, (seconds,) * 8)


def test_every_row_of_the_table_has_every_column() -> None:
    lines = compare.table([timed("a", 1e-3), Row("squeezenet", "b", 2, reason="not installed: pip install a|b")]).splitlines()
    assert lines[2] == "| squeezenet | a | 1 | 1 | 1.000 | 0.900 .. 1.100 | 1.0e-07 | - | 8 |"
    assert "not installed: pip install a\\|b" in lines[3]
    assert {line.replace("\\|", "").count("|") for line in lines} == {len(compare.HEADER) + 1}


def test_a_row_survives_json() -> None:
    for row in (timed("a", 1e-3), Row("squeezenet", "b", 2, reason="no")):
        assert Row.from_json(json.loads(json.dumps(dataclasses.asdict(row)))) == row


def test_bound_session_writes_outputs_of_its_shapes() -> None:
    written = []

    class Doubling:
        def get_outputs(self) -> list[SimpleNamespace]:
            return [SimpleNamespace(name="y", shape=(2,), dtype="float32")]

        def bind(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]):
            return lambda: written.append(np.multiply(inputs["x"], 2, out=outputs["y"]).tolist())

    compare.bound(Doubling(), {"x": np.array([1, 2], np.float32)})()
    assert written == [[2.0, 4.0]]


ROWS = [
    timed("tvmfuse", 9.0),
    timed("tvmfuse (A/A)", 1.0),
    timed("tvmfuse relaxed", 6.0),
    timed("onnxruntime", 10.0),
    timed("openvino", 12.0),
    timed("mnn", 8.0),
    Row("squeezenet", "tract", 1, reason="not installed"),
]


def test_mnn_counts_as_direct_only_where_it_transforms_nothing() -> None:
    exact, relaxed = targets.standings("squeezenet", 1, ROWS)
    assert (exact.best, exact.ratio.median, exact.target, exact.met) == ("onnxruntime", 0.9, 0.95, True)
    assert (relaxed.best, relaxed.ratio.median, relaxed.target, relaxed.met) == ("mnn", 0.75, 0.80, True)
    exact, _ = targets.standings("shufflenet", 1, ROWS)
    assert (exact.best, exact.target, exact.met) == ("mnn", 0.65, False)


def test_two_threads_meet_the_best_of_one_and_two() -> None:
    rows = [timed("tvmfuse", 5.0, 2), timed("onnxruntime", 10.0, 1), timed("onnxruntime", 6.0, 2), timed("openvino", 4.0, 1)]
    (standing,) = targets.standings("squeezenet", 2, rows)
    assert (standing.best, standing.ratio.median, standing.met) == ("openvino (1)", 1.25, False)


def test_no_standing_without_our_row_or_without_peers() -> None:
    assert not list(targets.standings("squeezenet", 1, ROWS[3:]))
    assert not list(targets.standings("squeezenet", 1, ROWS[:3]))


def test_the_picture_has_a_dot_for_each_standing_and_escapes_names() -> None:
    found = [*targets.standings("squeezenet", 1, ROWS), *targets.standings("a<b", 1, ROWS)]
    drawn = plot.svg(found)
    assert drawn.count('r="3"') == len(found)
    assert "a&lt;b" in drawn and "a<b" not in drawn
    assert plot.svg([]).startswith("<svg")


def test_every_model_of_the_zoo_has_targets() -> None:
    from bench import models

    assert set(targets.TARGETS) == set(models.ZOO)
