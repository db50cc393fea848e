"""Which loops of a kernel threads share."""

from __future__ import annotations

import pytest
import tvm_ffi
from tvm import tirx

from tvmfuse.kernel import emit
from tvmfuse.kernel.emit import Tile, Tiling
from tvmfuse.kernel.family import Buffer


def loops(panels: int, rows: int, threads: int) -> list[tuple[str, int]]:
    """(kind, extent) of each loop, outermost first, of a kernel over panels x rows whose threads prefer to share the rows."""

    def body(out: emit.Flat) -> None:
        def store(panel: Tile, row: Tile) -> None:
            out.store(panel[0] * rows + row[0], emit.constant(1.0, "float32", 1), 1)

        emit.shared_tiles((Tiling(panels), Tiling(rows)), threads, store, first_shared=(1,))

    found: list[tuple[str, int]] = []

    def note(loop: tirx.For) -> None:
        found.append(("parallel" if loop.kind == tirx.ForKind.PARALLEL else "serial", int(loop.extent)))

    kernel = emit.function("tiles", (Buffer((panels * rows,), "float32"),), body)
    tvm_ffi.structural_walk(kernel.body, (tirx.For, note), order="pre")
    return found


def test_threads_share_rows_where_they_come_out_even() -> None:
    assert loops(panels=4, rows=20, threads=2) == [("parallel", 2), ("serial", 4), ("serial", 10)]


def test_threads_share_panels_and_rows_where_rows_are_few() -> None:
    assert loops(panels=6, rows=3, threads=2) == [("parallel", 2), ("serial", 9)]


@pytest.mark.parametrize("rows", [3, 20])
def test_one_thread_has_no_parallel_loop(rows: int) -> None:
    assert loops(panels=4, rows=rows, threads=1) == [("serial", 4), ("serial", rows)]
