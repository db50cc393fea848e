"""How fast each model of the zoo is meant to be: our time over the best peer's in one interleaved run, at most."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvmfuse.compare import Ratio, Row, ratio

OURS, RELAXED = "tvmfuse", "tvmfuse relaxed"


@dataclass(frozen=True)
class Column:
    """Which of our rows is judged, in the run with how many threads, and whether by peers that transform convolutions too."""

    title: str
    runner: str
    threads: int
    direct: bool


COLUMNS = (
    Column("exact, 1 thread, direct peers", OURS, 1, True),
    Column("exact, 2 threads, direct peers", OURS, 2, True),
    Column("relaxed, 1 thread, all peers", RELAXED, 1, False),
)
DFN3 = ("enc", "erb_dec", "df_dec")
# In the columns' order.
TARGETS: dict[str, tuple[float | None, float | None, float | None]] = {
    "dfn3_enc_s1": (0.70, 0.70, None),
    "dfn3_erb_dec_s1": (0.85, 0.75, None),
    "dfn3_df_dec_s1": (0.85, 0.75, None),
    **{f"dfn3_{part}_s100": (0.55, 0.65, None) for part in DFN3},
    "mobilenetv2": (0.85, 0.60, None),
    "squeezenet": (0.95, 0.80, 0.80),
    "resnet50": (1.00, 1.00, 0.88),
    "vgg19": (1.00, 1.00, 0.88),
    "inception_v1": (0.95, 0.90, 0.75),
    "inception_v2": (1.00, 0.97, 0.80),
    "densenet121": (1.00, 0.85, 0.85),
    "shufflenet": (0.65, 0.55, None),
    "alexnet": (1.00, 1.00, 0.95),
    "zfnet512": (1.00, 1.00, 0.95),
}
# MNN computes convolutions directly only where no 3x3 convolution of stride 1 is left to transform.
DIRECT_IN_MNN = {*(f"dfn3_{part}_s{steps}" for part in DFN3 for steps in (1, 100)), "mobilenetv2", "shufflenet"}


@dataclass(frozen=True)
class Standing:
    """One model in one column: our time over the best peer's, with its interval; `met` says that the median keeps the target."""

    model: str
    column: Column
    best: str
    ratio: Ratio
    target: float | None

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.ratio.median <= self.target


def standings(model: str, threads: int, rows: Sequence[Row]) -> Iterator[Standing]:
    """What one run, made with `threads`, says in each column; nothing where our row or every peer is missing."""
    timed = [row for row in rows if row.samples_s]
    for i, column in enumerate(COLUMNS):
        own = next((row for row in timed if row.runner == column.runner), None)
        peers = [row for row in timed if not row.runner.startswith(OURS)]
        peers = [row for row in peers if row.runner != "mnn" or not column.direct or model in DIRECT_IN_MNN]
        if own is None or not peers or column.threads != threads:
            continue
        best = min(peers, key=lambda row: statistics.median(row.samples_s))
        label = best.runner if threads == 1 else f"{best.runner} ({best.threads})"
        target = TARGETS[model][i] if model in TARGETS else None
        yield Standing(model, column, label, ratio(own.samples_s, best.samples_s), target)


def table(found: Sequence[Standing]) -> str:
    """A line a model, as GitHub's Markdown: ratio [interval], the best peer, and the target with whether it is met."""
    cells: dict[str, dict[str, str]] = {}
    for s in found:
        verdict = "" if s.target is None else f", {'meets' if s.met else 'misses'} {s.target:.2f}"
        low, high = s.ratio.interval
        cells.setdefault(s.model, {})[s.column.title] = f"{s.ratio.median:.3f} [{low:.3f}, {high:.3f}] of {s.best}{verdict}"
    lines = [("model", *(column.title for column in COLUMNS)), ("---",) * (1 + len(COLUMNS))]
    lines += [(model, *(row.get(column.title, "-") for column in COLUMNS)) for model, row in cells.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
