"""Concatenations written in place by their producers: the values of a copy, whatever the family, the tails and the threads."""

from __future__ import annotations

import re

import numpy as np
import onnx.parser
import onnx.reference
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import tvmfuse
from tvmfuse.choose import Fuse
from tvmfuse.graph.rewrite import op_name

from .against_reference import assert_right, lowered

pytestmark = pytest.mark.usefixtures("small_kernels_are_shared")

X = (2, 6, 5, 7)
# operator, its weights and attributes; each keeps the image's size
PARTS = {
    "pointwise": ("Conv", (19, 6, 1, 1), {}),
    "conv2d": ("Conv", (33, 6, 3, 3), {"pads": [1, 1, 1, 1]}),
    "grouped": ("Conv", (10, 3, 3, 1), {"pads": [1, 0, 1, 0], "group": 2}),
    "depthwise": ("Conv", (6, 1, 3, 3), {"pads": [1, 1, 1, 1], "group": 6}),
    "transposed": ("ConvTranspose", (6, 21, 3, 3), {"pads": [1, 1, 1, 1]}),
}
FULL = tuple(PARTS)


def model(parts: tuple[str, ...], more: str = "", axis: int = 1) -> ModelProto:
    """relu(concat(relu(part(x)), ...)): `more` is "read twice", "returned part" or "pool"."""
    random = np.random.default_rng(1)
    nodes, weights, names = [], [], []
    for number, part in enumerate(parts):
        operator, shape, attributes = PARTS[part]
        weights.append(numpy_helper.from_array((random.standard_normal(shape) / 4).astype(np.float32), f"w{number}"))
        nodes += [helper.make_node(operator, ["x", f"w{number}"], [f"a{number}"], **attributes)]
        nodes += [helper.make_node("Relu", [f"a{number}"], [f"p{number}"])]
        names.append(f"p{number}")
    if more == "pool":
        nodes.append(helper.make_node("MaxPool", ["x"], ["pooled"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]))
        names.append("pooled")
    nodes.append(helper.make_node("Concat", names, ["c"], axis=axis))
    outputs = ["y", *(["p0"] if more == "returned part" else [])]
    if more == "read twice":
        nodes += [helper.make_node("ReduceMax", ["p0"], ["m"], axes=[1, 2, 3]), helper.make_node("Add", ["c", "m"], ["s"])]
    nodes.append(helper.make_node("Neg", ["s" if more == "read twice" else "c"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "c", "h", "w"]) for name in outputs],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def built(proto: ModelProto, fuse: Fuse = "always", threads: int = 1) -> tvmfuse.Session:
    return tvmfuse.build(proto, threads=threads, fuse=fuse)


def operators(proto: ModelProto, fuse: Fuse = "always") -> set[str]:
    """Names of those that are left once the sites are kernels."""
    return {op_name(binding.value) for binding in lowered(proto, fuse)}


@pytest.mark.parametrize("parts", [FULL, FULL[::-1], ("conv2d", "conv2d")], ids=["all", "reversed", "equal"])
def test_every_family_writes_its_columns(parts: tuple[str, ...]) -> None:
    proto = model(parts)
    assert "concat" not in operators(proto)
    assert_right(proto)


@pytest.mark.parametrize("more", ["read twice", "returned part", "pool"])
def test_others_are_copied(more: str) -> None:
    proto = model(("pointwise", "conv2d"), more)
    assert "concat" in operators(proto)
    assert_right(proto)


@pytest.mark.parametrize(
    "text",
    [
        # a part whose rows are two of its kernel's
        "(float[2,2,4] x, float[2,4] z) => (float[2,10] y) <float[4,3] v, float[4,4] w, int64[2] s = {2, 6}>"
        "{ a = MatMul(x, v) b = Reshape(a, s) c = MatMul(z, w) d = Concat<axis=1>(b, c) y = Neg(d) }",
        # one value twice
        "(float[4,8] x) => (float[4,6] y) <float[8,3] w> { a = MatMul(x, w) b = Relu(a) d = Concat<axis=1>(b, b) y = Neg(d) }",
        # parts of one column
        "(float[4,8] x) => (float[4,2] y) <float[8,1] v, float[8,1] w>"
        "{ a = MatMul(x, v) b = Relu(a) c = MatMul(x, w) d = Concat<axis=1>(b, c) y = Neg(d) }",
    ],
    ids=["merged rows", "twice", "one column"],
)
def test_parts_that_are_no_columns_of_their_kernels_are_copied(text: str) -> None:
    drawn = iter(range(9))

    def initial(match: re.Match[str]) -> str:
        rows, columns, name = int(match[1]), int(match[2]), match[3]
        values = np.random.default_rng(next(drawn)).integers(-3, 4, rows * columns)
        return f"float[{rows},{columns}] {name} = {{{', '.join(map(str, values))}}}"

    proto = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g ' + re.sub(r"float\[(\d),(\d)\] ([vw])", initial, text))
    assert "concat" in operators(proto)
    random = np.random.default_rng(0)
    feeds = {i.name: random.standard_normal([d.dim_value for d in i.type.tensor_type.shape.dim], np.float32) for i in proto.graph.input}
    (wanted,) = onnx.reference.ReferenceEvaluator(proto).run(None, feeds)
    np.testing.assert_allclose(built(proto).run(None, feeds)[0], wanted, rtol=1e-4, atol=1e-5)


def test_an_outer_axis_is_copied() -> None:
    proto = model(("conv2d", "conv2d"), axis=2)
    assert "concat" in operators(proto)
    assert_right(proto)


def test_a_returned_concatenation_is_copied() -> None:
    """The caller's buffer is no kernel's to share."""
    w = ", ".join(f"float[8,{n}] w{n} = {{{', '.join(str((3 * i) % 7 - 3) for i in range(8 * n))}}}" for n in (3, 5))
    text = "(float[4,8] x) => (float[4,8] y) <W> { a = MatMul(x, w3) b = MatMul(x, w5) y = Concat<axis=1>(a, b) }".replace("W", w, 1)
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    assert "concat" in operators(proto)
    x = np.random.default_rng(0).standard_normal((4, 8), np.float32)
    (wanted,) = onnx.reference.ReferenceEvaluator(proto).run(None, {"x": x})
    np.testing.assert_allclose(built(proto).run(None, {"x": x})[0], wanted, rtol=1e-5)


def test_an_epilogue_in_a_pass_of_its_own_is_copied() -> None:
    assert "concat" in operators(model(("conv2d", "conv2d")), "never")


def test_a_part_counts_with_what_it_writes() -> None:
    apart, whole = model(("conv2d",)), model(("conv2d", "conv2d"))
    (one,) = (cost for name, cost in built(apart).manifest.costs if name.startswith("conv2d"))
    assert [cost for name, cost in built(whole).manifest.costs if name.startswith("conv2d")] == [one, one]
