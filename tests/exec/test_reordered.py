"""Images in another order that a convolution reads through: the values of a copy, whatever the tile, the placement and the threads."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tvmfuse.building import compile_model, plan_for, prepare
from tvmfuse.choose import Chooser
from tvmfuse.graph.rewrite import op_name
from tvmfuse.kernel import candidates

from .against_reference import assert_right, lowered

pytestmark = pytest.mark.usefixtures("small_kernels_are_shared")

BUILDS = ("always", 1), ("never", 2)
N, H, W = 2, 5, 7


def model(
    channels: int, groups: int, last: tuple[tuple[int, ...], dict[str, object]], depthwise: bool = True, read_twice: bool = False
) -> ModelProto:
    """conv(depthwise(shuffle(relu(conv(x)))) + bias): a unit of ShuffleNet; `last` are the weights and attributes of its last one."""
    random = np.random.default_rng(1)
    weights: list[TensorProto] = []

    def constant(array: np.ndarray) -> str:
        weights.append(numpy_helper.from_array(array, f"c{len(weights)}"))
        return weights[-1].name

    def taps(*shape: int) -> str:
        return constant((random.standard_normal(shape) / 2).astype(np.float32))

    def shape(*extents: int) -> str:
        return constant(np.array(extents, np.int64))

    nodes: list[NodeProto] = [
        helper.make_node("Conv", ["x", taps(channels, 6, 1, 1)], ["a"]),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Reshape", ["b", shape(N, groups, channels // groups, H, W)], ["split"]),
        helper.make_node("Transpose", ["split"], ["swapped"], perm=[0, 2, 1, 3, 4]),
        helper.make_node("Reshape", ["swapped", shape(N, channels, H, W)], ["shuffled"]),
    ]
    if depthwise:
        taken = ["shuffled", taps(channels, 1, 3, 3), taps(channels)]
        nodes.append(helper.make_node("Conv", taken, ["d"], pads=[1, 1, 1, 1], strides=[2, 1], group=channels))
    kernel, attributes = last
    nodes.append(helper.make_node("Conv", ["d" if depthwise else "shuffled", taps(*kernel)], ["y"], **attributes))
    if read_twice:
        nodes.append(helper.make_node("Neg", ["shuffled"], ["z"]))
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (N, 6, H, W))],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "c", "h", "w"]) for name in (["y", "z"] if read_twice else ["y"])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def stem(n: int, channels: int, kernel: tuple[int, int], returned: bool = False, **attributes: object) -> ModelProto:
    """relu(conv(x)) of images as a model's input has them; and x with its channels last, where that is returned too."""
    weights = np.random.default_rng(1).standard_normal((24, channels, *kernel), np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], **attributes), helper.make_node("Relu", ["c"], ["y"])]
    nodes += [helper.make_node("Transpose", ["x"], ["z"], perm=[0, 2, 3, 1])] if returned else []
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, list("nchw")) for name in (["y", "z"] if returned else ["y"])]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (n, channels, 11, 61))
    graph = helper.make_graph(nodes, "g", [x], outputs, [numpy_helper.from_array(weights, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def permutations(proto: ModelProto, to: tuple[int, ...] | None = None) -> int:
    """How many of five axes, which a shuffle's are, or to shape `to`, an anchor's kernel still reads the result of."""
    bindings = lowered(proto)
    read = [argument for b in bindings if op_name(b.value) == "call_tir" for argument in b.value.args[1].fields]
    turned = [b.var for b in bindings if op_name(b.value) == "permute_dims" and any(b.var.same_as(argument) for argument in read)]
    shapes = [tuple(int(extent) for extent in var.ty.shape.values) for var in turned]
    return sum(shape == to if to else len(shape) == 5 for shape in shapes)


POINTWISE = {"group": 2}


@pytest.mark.parametrize(
    ("channels", "groups", "last"),
    [
        (136, 4, ((136, 34, 1, 1), {"group": 4})),  # 34 channels a group: the second one starts in the middle of a row of the shuffle
        (30, 3, ((34, 15, 1, 1), {"group": 2})),
        (24, 2, ((9, 8, 2, 3), {"group": 3, "dilations": [1, 2], "strides": [1, 2]})),
        (12, 3, ((5, 12, 3, 2), {})),
    ],
    ids=["4 groups", "other groups", "window", "ungrouped"],
)
def test_a_convolution_reads_through_a_shuffle(channels: int, groups: int, last: tuple[tuple[int, ...], dict[str, object]]) -> None:
    proto = model(channels, groups, last)
    assert permutations(proto) == 0
    assert_right(proto, BUILDS)


def test_a_shuffle_right_before_it_is_read_through() -> None:
    proto = model(24, 3, ((8, 12, 1, 1), POINTWISE), depthwise=False)
    assert permutations(proto) == 0
    assert_right(proto, BUILDS)


@pytest.mark.parametrize(
    "proto",
    [
        model(24, 3, ((8, 12, 1, 1), POINTWISE), depthwise=False, read_twice=True),
        model(32, 4, ((1, 32, 2, 2), {})),  # a dot product loads vectors of channels
        model(24, 3, ((24, 2, 3, 3), {"group": 12, "pads": [1, 0, 1, 0]})),  # the default copies the image into its padding
    ],
    ids=["read twice", "dot product", "padded"],
)
def test_others_are_copied(proto: ModelProto) -> None:
    assert permutations(proto) == 1
    assert_right(proto, BUILDS)


def test_every_tile_gives_the_same_bits() -> None:
    prepared, plan = prepare(model(24, 3, ((40, 12, 1, 1), POINTWISE))), plan_for(None, 1, "always", None)
    (workload,) = [site.workload for site in prepared.sites if site.workload.family == "conv2d"]
    tiles = candidates(workload, plan.machine)
    feeds = {"x": np.random.default_rng(0).standard_normal((N, 6, H, W), np.float32)}
    results = set()
    for candidate in (*tiles[:2], *tiles[-2:]):
        session = compile_model(prepared, plan, Chooser("always", plan.machine, tried={workload: candidate}))
        results.add(session.run(None, feeds)[0].tobytes())
    assert len(results) == 1


@pytest.mark.parametrize(
    "proto",
    [
        stem(1, 3, (3, 3), pads=[1, 1, 1, 1], strides=[2, 2]),
        stem(1, 3, (7, 7), pads=[3, 2, 2, 3], strides=[2, 1]),
        stem(1, 5, (2, 3), dilations=[2, 1]),
        stem(1, 11, (3, 3), pads=[0, 1, 0, 1]),  # as many channels as rows
        stem(1, 3, (3, 3), returned=True),
    ],
    ids=["3x3", "7x7", "dilated", "channels like rows", "returned"],
)
def test_a_convolution_reads_the_planes_of_an_image(proto: ModelProto) -> None:
    channels = proto.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    assert permutations(proto, (1, 11, 61, channels)) == 0
    assert_right(proto, BUILDS)


def test_planes_of_two_images_are_copied() -> None:
    proto = stem(2, 3, (3, 3))
    assert permutations(proto, (2, 11, 61, 3)) == 1
    assert_right(proto, BUILDS)
