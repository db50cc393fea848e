"""Accumulators are registers: LLVM knows that nobody reads them when a tile is done."""

from __future__ import annotations

import pytest
import tvm

from tvmfuse.kernel import build_kernel, candidates
from tvmfuse.kernel.space import check_tile
from tvmfuse.values import AVX2, AVX512, ISA, NEON, Anchor, Conv2d, Epilogue, Machine, Matmul, Workload

ANCHORS = [
    Matmul(1, 40, 40, 8),
    Matmul(1, 9, 1, 40),  # dot products
    Conv2d(1, 6, 33, 8, 40, 3, 3),
    Conv2d(1, 6, 33, 24, 24, 3, 3, groups=24),
]


@pytest.mark.parametrize("anchor", ANCHORS, ids=str)
def test_accumulators_are_not_taken_from_a_pool(anchor: Anchor) -> None:
    workload, machine = Workload(anchor, Epilogue((), ())), Machine(AVX2, 32 << 10, 512 << 10, 8 << 20)
    (launch,) = build_kernel(workload, candidates(workload, machine)[0], machine).launches
    target = tvm.target.Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell"})
    code = tvm.compile(tvm.IRModule({"f": launch.func.with_attr("global_symbol", "f")}), target)
    assert "fma" in code.mod.inspect_source("ll")
    assert "AllocWorkspace" not in code.mod.inspect_source("ll")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("isa", [AVX512, AVX2, NEON], ids=lambda isa: isa.name)
def test_every_tile_on_offer_fits_the_registers(isa: ISA, dtype: str) -> None:
    for size, ci, co, groups in ((1, 1, 64, 1), (1, 64, 256, 1), (3, 8, 256, 1), (5, 2, 1, 1), (1, 8, 512, 2)):
        anchor = Conv2d(1, size, size, ci, co, 3, 3, padding=(1, 1, 1, 1), groups=groups, dtype=dtype)
        for candidate in candidates(Workload(anchor), Machine(isa)):
            check_tile(candidate["th"] * candidate["tw"], candidate["nr"], Machine(isa), dtype)
