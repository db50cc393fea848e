"""What is left of an ONNX model once its sites are kernels, and its values beside ONNX's reference evaluator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx.reference
from onnx import ModelProto
from tvm.relax import Binding

import tvmfuse
from tvmfuse.building import plan_for, prepare
from tvmfuse.choose import Fuse
from tvmfuse.kernel.lower import lower_sites

EVERY_BUILD: tuple[tuple[Fuse, int], ...] = (("always", 1), ("always", 2), ("never", 1), ("never", 2))


def lowered(proto: ModelProto, fuse: Fuse = "always") -> list[Binding]:
    """The bindings of main, in order."""
    prepared, plan = prepare(proto), plan_for(None, 1, fuse, None)
    main = lower_sites(prepared.mod, prepared.sites, plan.chooser, plan.machine).mod["main"]
    return list(main.body.blocks[0].bindings)


def assert_right(proto: ModelProto, builds: Sequence[tuple[Fuse, int]] = EVERY_BUILD) -> None:
    """The reference's values on inputs of one seed, and the same bits from every build, a (fuse, threads) each."""
    random = np.random.default_rng(0)
    feeds = {i.name: random.standard_normal([d.dim_value for d in i.type.tensor_type.shape.dim], np.float32) for i in proto.graph.input}
    wanted = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
    results = [tvmfuse.build(proto, fuse=fuse, threads=threads).run(None, feeds) for fuse, threads in builds]
    for result in results:
        for got, same, right in zip(result, results[0], wanted, strict=True):
            assert got.tobytes() == same.tobytes()
            np.testing.assert_allclose(got, right, rtol=1e-4, atol=1e-5)
