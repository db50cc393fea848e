"""Whole models in several runtimes, timed in one interleaved run.

A round takes one sample of every runner, in random order; a ratio is formed within a round, where all sides met the same
machine. What is compared is entered a second time: its ratio to itself (A/A) is the noise of the run.
Source: duet benchmarking, arXiv 2001.05811.
"""

from __future__ import annotations

import hashlib
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .session import Session

Arrays = Mapping[str, np.ndarray]
Clock = Callable[[], float]
Timer = Callable[[int, bool], Sequence[float]]
"""timer(repeats, warm): seconds of each of `repeats` calls, after one that isn't timed if `warm`."""

SAMPLE_S = 5e-3
MIN_ROUNDS = 5
LONG_S = 0.1
SLOW = 5.0  # times the first runner's: it won't be the best, and would eat the time of the others
CONFIDENCE = 0.95


def timer(call: Callable[[], object], clock: Clock) -> Timer:
    """A call in this process as a timer."""

    def time(repeats: int, warm: bool) -> list[float]:
        if warm:
            call()
        seconds = []
        for _ in range(repeats):
            start = clock()
            call()
            seconds.append(clock() - start)
        return seconds

    return time


def bound(session: Session, feeds: Arrays) -> Callable[[], None]:
    """A call of the session over buffers of its own for the outputs."""
    return session.bind(feeds, {info.name: np.empty(info.shape, info.dtype) for info in session.get_outputs()})


def draw(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    """An input: standard normal numbers; zeros and ones where the type is not a float."""
    values = rng.standard_normal(shape) if np.dtype(dtype).kind == "f" else rng.integers(0, 2, shape)
    return np.asarray(values, dtype)


@dataclass(frozen=True)
class Times:
    """`samples` has one time per round, seconds per call, comparable with other runners' of the same round; `calls` every call's."""

    samples: tuple[float, ...]
    calls: tuple[float, ...]


def interleave(timers: Mapping[str, Timer], seconds: float, clock: Clock, seed: int = 0, slow: float = SLOW) -> dict[str, Times]:
    """Rounds over all timers; at least MIN_ROUNDS, more while time is left. A sample is the median of some milliseconds of calls.

    Each sample starts with a call that is not timed: it brings back what the others drove out of the caches.
    A runner that takes `slow` times as long as the first is timed once and not entered into the rounds.
    """
    once = {name: _first(time) for name, time in timers.items()}
    first = next(iter(once))
    repeats = {name: max(1, round(SAMPLE_S / max(s, 1e-7))) for name, s in once.items() if s <= slow * once[first]}
    found: dict[str, list[list[float]]] = {name: [] if name in repeats else [[s]] for name, s in once.items()}
    order, shuffle = list(repeats), random.Random(seed).shuffle
    end = clock() + seconds
    while clock() < end or len(found[first]) < MIN_ROUNDS:
        shuffle(order)
        for name in order:
            found[name].append(list(timers[name](repeats[name], True)))
    return {name: Times(tuple(map(statistics.median, rounds)), tuple(s for r in rounds for s in r)) for name, rounds in found.items()}


def samples(calls: Mapping[str, Callable[[], object]], seconds: float, clock: Clock) -> dict[str, tuple[float, ...]]:
    """Calls of this process, interleaved: seconds per call, one a round, of all of them in every round."""
    timers = {name: timer(call, clock) for name, call in calls.items()}
    return {name: times.samples for name, times in interleave(timers, seconds, clock, slow=math.inf).items()}


def _first(time: Timer) -> float:
    """Seconds of a call; a short one is repeated, since the first calls of a process that was stopped are slow."""
    (once,) = time(1, False)
    return once if once > LONG_S else min(time(max(5, round(SAMPLE_S / max(once, 1e-7))), True))


@dataclass(frozen=True)
class Ratio:
    """Median of a / b over the rounds, its confidence interval by order statistics, and the quartiles of the ratios themselves."""

    median: float
    interval: tuple[float, float]
    quartiles: tuple[float, float]


def ratio(a: Sequence[float], b: Sequence[float]) -> Ratio:
    """Samples of `a` over those of `b`, round by round; where one was timed only once, it meets the other's median."""
    if len(a) == len(b):
        ratios = sorted(x / y for x, y in zip(a, b, strict=True))
    else:
        ratios = [statistics.median(a) / statistics.median(b)]
    if len(ratios) < 2:
        return Ratio(ratios[0], (ratios[0], ratios[0]), (ratios[0], ratios[0]))
    low, middle, high = quartiles(ratios)
    rank = median_rank(len(ratios))
    return Ratio(middle, (ratios[rank], ratios[-1 - rank]), (low, high))


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def median_rank(count: int) -> int:
    """k such that the k-th smallest and largest (from 0) of `count` values hold their median with CONFIDENCE; 0 if none do."""
    tail, k = 0.5**count, 0
    while 2 * (tail + math.comb(count, k + 1) * 0.5**count) <= 1 - CONFIDENCE:
        k += 1
        tail += math.comb(count, k) * 0.5**count
    return k


def difference(exact: Arrays, x: Arrays) -> float:
    """Largest |difference| over largest |exact|, the worst output's; infinite where shapes or NaN differ."""
    worst = 0.0
    for name, value in exact.items():
        if name not in x or x[name].shape != value.shape:
            return math.inf
        if value.size:
            error = float(np.abs(value - x[name]).max() / max(np.abs(value).max(), 1e-30))
            worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def digest(x: np.ndarray) -> str:
    """Of type, shape and bits; all NaN count as one, since what they carry differs between CPUs."""
    canonical = np.where(np.isnan(x), np.array(np.nan, x.dtype), x) if x.dtype.kind == "f" else x
    return hashlib.sha256(f"{x.dtype} {x.shape} ".encode() + np.ascontiguousarray(canonical).tobytes()).hexdigest()


@dataclass(frozen=True)
class Row:
    """One runner of one model. A runner that could not be timed has a `reason` and nothing else.

    ratio         the first runner's time over this one's.
    error         largest |difference| to a float64 run, over the largest |output|; None where there is none.
    samples_s     one a round, to be compared with those of the same round. percentiles_s: of the single calls.
    bits          a digest of its first outputs, with all NaN as one: equal where they are equal to the bit.
    memory_bytes  what its process grew by, from before it loaded (or built) the model to after its first outputs.
    calls_per_s   of several threads calling at a time.
    """

    model: str
    runner: str
    threads: int
    median_s: float | None = None
    ratio: Ratio | None = None
    percentiles_s: Mapping[str, float] | None = None
    error: float | None = None
    samples_s: tuple[float, ...] = ()
    load_s: float | None = None
    memory_bytes: float | None = None
    calls_per_s: float | None = None
    reason: str | None = None
    bits: str | None = None

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Row:
        """Raises TypeError or KeyError when `data` is not a row."""
        r = data["ratio"]
        ratio = Ratio(r["median"], tuple(r["interval"]), tuple(r["quartiles"])) if r else None
        return Row(**{**data, "ratio": ratio, "samples_s": tuple(data["samples_s"])})


def compare(model: str, calls: Mapping[str, Callable[[], object]], seconds: float, clock: Clock, threads: int = 1) -> list[Row]:
    """Sessions of this process, which give equal bits: the first against each of the others and, first of all, against itself."""
    first, call = next(iter(calls.items()))
    times = samples({first: call, f"{first} (A/A)": call, **calls}, seconds, clock)
    return [Row(model, name, threads, statistics.median(s), ratio(times[first], s), samples_s=s) for name, s in times.items()]


def percentiles(calls: Sequence[float]) -> dict[str, float]:
    """Of the single calls, in seconds."""
    p50, p90, p99 = np.percentile(calls, (50, 90, 99))
    return {"min": min(calls), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


HEADER = ("model", "runner", "threads", "median ms", "first / this", "95 % interval", "error", "MiB", "rounds")


def table(rows: Sequence[Row]) -> str:
    """As GitHub's Markdown."""
    lines = [HEADER, ("---", "---", *["---:"] * 7)]
    for row in rows:
        lead = row.model, row.runner, str(row.threads)
        if row.ratio is None or row.median_s is None:
            lines.append((*lead, "-", "-", (row.reason or "").replace("|", "\\|"), "-", "-", "-"))
            continue
        low, high = row.ratio.interval
        interval = f"{low:.3f} .. {high:.3f}" if len(row.samples_s) > 1 else "timed once"
        error = "-" if row.error is None else f"{row.error:.1e}"
        memory = "-" if row.memory_bytes is None else f"{row.memory_bytes / 2**20:.0f}"
        lines.append((*lead, f"{row.median_s * 1e3:.4g}", f"{row.ratio.median:.3f}", interval, error, memory, str(len(row.samples_s))))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
