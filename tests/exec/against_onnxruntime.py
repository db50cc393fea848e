"""Load a model, compile it with stock TVM, and compare its outputs with ONNX Runtime's."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import tvm
from tvm import relax

from tvmfuse.model.load import Loaded, load

# Not "generic": LLVM 22 rejects TVM's pooling loops for a CPU without vector features.
TARGET = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}


def run(loaded: Loaded, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    machine = relax.VirtualMachine(tvm.compile(loaded.mod, tvm.target.Target(TARGET)), tvm.cpu())
    result = machine["main"](*[tvm.runtime.tensor(feeds[info.name]) for info in loaded.inputs])
    return [result.numpy()] if isinstance(result, tvm.runtime.Tensor) else [field.numpy() for field in result]


def random_feeds(loaded: Loaded, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {info.name: rng.standard_normal(info.shape).astype(info.dtype) for info in loaded.inputs}


def assert_matches(model: onnx.ModelProto, shapes=None, tolerance: float = 1e-5) -> None:
    """Every output within `tolerance` of its scale."""
    loaded = load(model, shapes)
    feeds = random_feeds(loaded)
    wanted = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    for info, got, want in zip(loaded.outputs, run(loaded, feeds), wanted, strict=True):
        assert (got.shape, str(got.dtype)) == (want.shape, str(want.dtype)) == (info.shape, info.dtype)
        assert np.abs(got - want).max() <= tolerance * max(np.abs(want).max(), 1e-3), info.name
