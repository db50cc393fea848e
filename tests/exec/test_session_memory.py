"""A session that runs for a long time takes no more memory than at its start."""

from __future__ import annotations

import gc

import numpy as np
import psutil
import pytest
import tvm
from tvm import relax

import tvmfuse

RUNS = 100_000
GROWTH_BYTES = 4 << 20  # 42 bytes a run: the smallest object of Python takes 16, an array 112


@pytest.fixture(scope="module")
def session() -> tvmfuse.Session:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2, 3), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            product = builder.emit(relax.op.matmul(x, relax.const(np.ones((3, 4), np.float32))))
            split = builder.emit(relax.op.reshape(product, (2, 2, 2)))
            out = builder.emit_output(relax.op.nn.relu(split))
        builder.emit_func_output(out)
    return tvmfuse.build(tvm.IRModule(builder.get().functions), threads=1)


def resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.parametrize("way", ["run", "bind"])
def test_memory_stays_flat_over_a_hundred_thousand_runs(session: tvmfuse.Session, way: str) -> None:
    x, y = np.ones((2, 3), np.float32), np.empty((2, 2, 2), np.float32)
    bound = session.bind({"x": x}, {session.get_outputs()[0].name: y})
    call = bound if way == "bind" else lambda: session.run(None, {"x": x})
    for _ in range(1000):
        call()
    before = resident_bytes()
    for _ in range(RUNS):
        call()
    assert resident_bytes() - before < GROWTH_BYTES
    assert (y == 3).all() or way == "run"
