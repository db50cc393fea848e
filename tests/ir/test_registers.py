"""Accumulators are registers: LLVM knows that nobody reads them when a tile is done."""

from __future__ import annotations

import pytest
import tvm

from tvmfuse.kernel import build_kernel, candidates
from tvmfuse.values import AVX2, Anchor, Conv2d, Epilogue, Machine, Matmul, Workload

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
