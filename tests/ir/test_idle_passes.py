"""What a build leaves out of TVM's lowering changes nothing."""

from __future__ import annotations

import importlib

import numpy as np
import onnx.parser
import pytest
import tvm
import tvm_ffi
from tvm.script import tirx as T

from tvmfuse import building

NETWORK = """<ir_version: 8, opset_import: ["": 17]>
g (float[1,8,12,12] x) => (float[1,8,2,2] y, float[1,8,14,12] z) {
  a = Conv(x, w)
  b = Relu(a)
  c = Conv <group=8, pads=[1,1,1,1]> (b, d)
  e = Sigmoid(c)
  y = AveragePool <kernel_shape=[6,6], strides=[6,6]> (e)
  s = Softmax(c)
  h = Slice(s, starts, ends, axes)
  z = Concat <axis=2> (s, h)
}"""


def network() -> onnx.ModelProto:
    model = onnx.parser.parse_model(NETWORK)
    for name, shape in (("w", (8, 8, 1, 1)), ("d", (8, 1, 3, 3))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    for name, value in (("starts", 0), ("ends", 2), ("axes", 2)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([value], np.int64), name))
    return model


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_are_the_same_without_the_idle_passes(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[tvm.IRModule] = []
    left_out: list[list[str]] = []
    lowering, idle = importlib.import_module("tvm.tirx.build"), building.idle_passes
    compiled = lowering.tir_to_runtime
    monkeypatch.setattr(lowering, "tir_to_runtime", lambda host, *rest: lowered.append(host) or compiled(host, *rest))
    for passes in (lambda functions: left_out.append(idle(functions)) or left_out[-1], lambda functions: []):
        monkeypatch.setattr(building, "idle_passes", passes)
        building.build(network(), threads=threads)
    assert left_out == [[*building.FOR_DEVICES, *building.FOR_BLOCKS]]
    without, whole = ({var.name_hint: func for var, func in mod.functions.items()} for mod in lowered)
    assert without.keys() == whole.keys()
    different = [name for name in whole if not tvm_ffi.structural_equal(without[name], whole[name], map_free_vars=True)]
    assert not different


def test_what_is_for_blocks_runs_where_there_are_blocks() -> None:
    @T.prim_func(s_tir=True)
    def copy(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("copy"):
                v = T.axis.spatial(4, i)
                y[v] = x[v]

    assert building.idle_passes(tvm.IRModule({"copy": copy})) == list(building.FOR_DEVICES)
