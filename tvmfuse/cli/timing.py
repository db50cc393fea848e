"""`tvmfuse bench`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .. import peers
from ..errors import UsageError
from .arguments import AsJson, Logs, Model, Shapes, Threads, parse_shapes
from .output import counted, say

if TYPE_CHECKING:
    from ..compare import Row


def bench(
    model: Model,
    shape: Shapes = None,
    threads: Threads = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time to measure for.")] = 10,
    peer: Annotated[list[str] | None, typer.Option(metavar="NAME", help=f"Only these: {', '.join(peers.PEERS)}; may be repeated.")] = None,
    logs: Logs = None,
    as_json: AsJson = False,
) -> None:
    """Time a model beside always, never and every other runtime that is installed.

    All are timed in turn, each in a process of its own, on the same random inputs; the first row is also timed against itself (A/A).
    Error is against a float64 run. Peers run on one thread and on as many as we do.
    """
    import numpy as np  # --help waits for none of these
    import onnx

    from .. import benching
    from ..compare import draw
    from ..model.load import load
    from ..processors import default_threads
    from .tables import print_table

    unknown = [name for name in peer or () if name not in peers.PEERS]
    if unknown:
        raise UsageError(f"no peer is called {unknown[0]!r}; there are {', '.join(peers.PEERS)}")
    count = threads or default_threads()
    loaded = load(model, parse_shapes(shape))
    rng = np.random.default_rng(0)
    feeds = {info.name: draw(rng, info.shape, info.dtype) for info in loaded.inputs}
    entries = benching.ours("tvmfuse measured", count, fuse="measured", logs=logs)
    entries += [benching.Entry(f"tvmfuse {how}", "tvmfuse", count, {"fuse": how}) for how in ("always", "never")]
    entries += benching.others(peer or peers.USUAL, count)
    # One caller on all threads, or a caller for each: what a server would choose between
    rows = benching.bench(model.name, onnx.load(model), feeds, entries, seconds, callers=count, progress=say)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
        return
    print_table([cells(row, count) for row in rows])
    for row in rows:
        if row.reason:
            say(f"{row.runner}, {counted(row.threads, 'thread')}: {row.reason}")


def cells(row: Row, callers: int) -> dict[str, str]:
    """A row as a line of a table: heading -> text."""
    found = {"runner": row.runner, "threads": str(row.threads)}
    if row.ratio is None or row.percentiles_s is None:
        return {
            **found,
            **dict.fromkeys((*("min", "p50", "p90", "p99"), "ours / this", "95 % interval", f"calls/s of {callers}", "MiB", "error"), "-"),
        }
    low, high = row.ratio.interval
    return {
        **found,
        **{f"{name}": f"{s * 1e3:.4g} ms" for name, s in row.percentiles_s.items()},
        "ours / this": f"{row.ratio.median:.3f}",
        "95 % interval": f"{low:.3f} .. {high:.3f}" if len(row.samples_s) > 1 else "timed once",
        f"calls/s of {callers}": "-" if row.calls_per_s is None else f"{row.calls_per_s:.4g}",
        "MiB": "-" if row.memory_bytes is None else f"{row.memory_bytes / 2**20:.0f}",
        "error": "-" if row.error is None else f"{row.error:.1e}",
    }
