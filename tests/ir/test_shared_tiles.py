"""Which loops of a kernel threads share."""

from __future__ import annotations

import dataclasses

import pytest
import tvm_ffi
from tvm import tirx

from tvmfuse import kernel
from tvmfuse.kernel import emit
from tvmfuse.kernel.emit import Tile, Tiling
from tvmfuse.kernel.family import Buffer
from tvmfuse.values import AVX2, Machine, Matmul, Workload


def loops(func: tirx.PrimFunc) -> list[tuple[str, int]]:
    """(kind, extent) of each loop, outermost first."""
    found: list[tuple[str, int]] = []

    def note(loop: tirx.For) -> None:
        found.append(("parallel" if loop.kind == tirx.ForKind.PARALLEL else "serial", int(loop.extent)))

    tvm_ffi.structural_walk(func.body, (tirx.For, note), order="pre")
    return found


def panels_of_rows(panels: int, rows: int, threads: int) -> tirx.PrimFunc:
    """A kernel over panels x rows whose threads prefer to share the rows."""

    def body(out: emit.Flat) -> None:
        def store(panel: Tile, row: Tile) -> None:
            out.store(panel[0] * rows + row[0], emit.constant(1.0, "float32", 1), 1)

        emit.shared_tiles((Tiling(panels), Tiling(rows)), threads, store, preferred=[(1,)])

    return emit.function("tiles", (Buffer((panels * rows,), "float32"),), body)


def matmul(batch: int) -> tirx.PrimFunc:
    """Of two threads, with three panels of B that follow each other and 80 tiles of rows."""
    workload, machine = Workload(Matmul(batch, 320, 48, 7)), Machine(AVX2, threads=2)
    tile = {"mr": 4, "nr": 16, "ku": 1, "order": "panels", "threads": 2}
    candidate = dataclasses.replace(kernel.candidates(workload, machine)[0], knobs=tuple(sorted(tile.items())))
    return kernel.build_kernel(workload, candidate, machine).launches[-1].func


def test_threads_share_rows_where_they_come_out_even() -> None:
    assert loops(panels_of_rows(4, 20, threads=2)) == [("parallel", 2), ("serial", 4), ("serial", 10)]


def test_threads_share_panels_and_rows_where_rows_are_few() -> None:
    assert loops(panels_of_rows(6, 3, threads=2)) == [("parallel", 2), ("serial", 9)]


@pytest.mark.parametrize("rows", [3, 20])
def test_one_thread_has_no_parallel_loop(rows: int) -> None:
    assert loops(panels_of_rows(4, rows, threads=1)) == [("serial", 4), ("serial", rows)]


def test_threads_share_the_products_of_a_batch_where_they_come_out_even() -> None:
    """Each reads the panels of its own products only."""
    assert loops(matmul(batch=16))[:4] == [("parallel", 2), ("serial", 8), ("serial", 3), ("serial", 80)]
    assert loops(matmul(batch=2))[:4] == [("parallel", 2), ("serial", 2), ("serial", 3), ("serial", 40)]
