"""Operators whose meaning depends on attributes or on the operator set compute what ONNX Runtime computes."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvmfuse
from tests.exec.against_onnxruntime import assert_matches

Case = tuple  # operator, first and last operator set, operands (a shape: an input; an array: a constant; None: absent), attributes
RNG = np.random.default_rng(0)
X = (1, 2, 6, 7)


def floats(*values):
    return np.array(values, np.float32)


def ints(*values):
    return np.array(values, np.int64)


def noise(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


CASES: list[Case] = [
    ("Sum", 8, 23, [(2, 3), (3,), (1,)], {}),
    ("Sum", 7, 23, [(2, 3)], {}),
    ("Max", 8, 23, [(2, 3), (3,)], {}),
    ("Min", 8, 23, [(2, 3), (2, 1), (3,)], {}),
    ("Mean", 8, 23, [(2, 3), (3,), (2, 1)], {}),
    ("Gemm", 7, 23, [(2, 3), (3, 4), (4,)], {}),
    ("Gemm", 7, 23, [(3, 2), (4, 3), (4,)], {"alpha": 0.5, "beta": 2.0, "transA": 1, "transB": 1}),
    ("Gemm", 7, 23, [(2, 3), noise(4, 3), noise(2, 1)], {"alpha": 2.0, "beta": 0.3, "transB": 1}),
    ("Gemm", 11, 23, [(2, 3), (3, 4)], {"alpha": 0.5}),
    *[("LRN", 7, 23, [(1, 7, 3, 3)], {"size": size, "alpha": 0.1, "beta": 0.6, "bias": 1.5}) for size in (1, 3, 5)],
    *[
        ("AveragePool", 7, 23, [X], {"kernel_shape": [3, 2], "strides": [2, 3], "pads": [0, 1, 1, 0], "count_include_pad": counted})
        for counted in (0, 1)
    ],
    *[
        ("AveragePool", 10, 23, [X], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": pads, "ceil_mode": 1, "count_include_pad": n})
        for n in (0, 1)
        for pads in ([0, 0, 0, 0], [1, 1, 1, 1])
    ],
    *[
        (pool, 7, 23, [X], {"kernel_shape": [2, 3], "strides": [2, 1], "auto_pad": padding})
        for pool in ("AveragePool", "MaxPool")
        for padding in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ],
    ("AveragePool", 7, 23, [(1, 4, 6, 3)], {"kernel_shape": [2, 2]}),
    ("MaxPool", 10, 23, [X], {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1, "dilations": [1, 2]}),
    ("MaxPool", 7, 23, [(1, 2, 7, 7)], {"kernel_shape": [2, 3], "strides": [2, 3], "auto_pad": "SAME_LOWER"}),
    ("GlobalAveragePool", 7, 23, [X], {}),
    ("Concat", 7, 23, [(2, 3), (2, 1)], {"axis": 1}),
    *[("PRelu", 7, 23, [(2, 3, 4, 4), noise(*shape)], {}) for shape in ((), (1,), (4,), (3, 1, 1), (1, 3, 1, 1), (3, 4, 4), (2, 3, 4, 4))],
    ("Conv", 7, 23, [(1, 4, 7, 6), (4, 2, 3, 3), (4,)], {"pads": [1, 0, 2, 1], "dilations": [2, 1], "group": 2}),
    ("ConvTranspose", 7, 23, [(1, 4, 4, 3), noise(4, 3, 3, 2)], {"strides": [2, 2], "group": 2, "output_padding": [1, 1]}),
    ("ConvTranspose", 7, 23, [(1, 2, 4, 3), noise(2, 3, 3, 2)], {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
    ("Softmax", 7, 23, [(2, 3, 4)], {"axis": 1}),
    ("Softmax", 7, 23, [(2, 3, 4)], {}),
    ("Clip", 7, 10, [(3, 4)], {"min": -0.5, "max": 0.5}),
    ("Clip", 7, 10, [(3, 4)], {"max": 0.5}),
    ("Clip", 11, 23, [(3, 4), np.float32(-0.5), np.float32(0.5)], {}),
    ("Clip", 11, 23, [(3, 4), np.float32(np.nan), np.float32(0.5)], {}),
    ("Clip", 11, 23, [(3, 4), np.float32(0.5), np.float32(-0.5)], {}),
    ("Clip", 11, 23, [(3, 4), (), ()], {}),
    ("Pad", 7, 10, [(1, 2, 4, 4)], {"pads": [0, 0, 1, 2, 0, 0, 3, 3], "mode": "reflect"}),
    ("Pad", 7, 10, [(1, 2, 4, 4)], {"pads": [0, 0, -1, 2, 0, 0, 0, -1], "value": 1.5}),
    ("Pad", 11, 23, [(1, 2, 4, 4), ints(0, 0, 1, 2, 0, 0, 3, 4), np.float32(1.5)], {}),
    ("Pad", 11, 23, [(1, 2, 4, 4), ints(0, 0, 1, 2, 0, 0, 3, 3)], {"mode": "edge"}),
    ("Pad", 18, 23, [(1, 2, 4, 4), ints(1, 2, 3, 0), np.float32(0), ints(3, -2)], {}),
    ("Pad", 19, 23, [(1, 2, 4, 4), ints(0, 0, 1, 2, 0, 0, 3, 3)], {"mode": "wrap"}),
    ("Slice", 7, 9, [(4, 5, 6)], {"axes": [0, 2], "starts": [1, -3], "ends": [3, 99]}),
    ("Slice", 10, 23, [(4, 5, 6), ints(1, -1), ints(3, -99), ints(0, 2), ints(1, -2)], {}),
    ("Pow", 12, 23, [(2, 3), ints(2)], {}),
    ("ThresholdedRelu", 10, 21, [(2, 3)], {"alpha": 0.3}),
    ("Upsample", 7, 8, [(1, 2, 3, 4)], {"scales": [1.0, 1.0, 2.0, 2.0]}),
    ("Upsample", 9, 9, [(1, 2, 3, 4), floats(1, 1, 2, 3)], {}),
    ("Upsample", 9, 9, [(1, 2, 3, 4), floats(1, 1, 2, 2)], {"mode": "linear"}),
    *[("Resize", 10, 10, [(1, 1, 4, 6), floats(1, 1, 1.5, 0.5)], {"mode": mode}) for mode in ("nearest", "linear")],
    *[
        ("Resize", 11, 23, [(1, 1, 4, 6), floats(), floats(1, 1, 1.5, 2)], {"mode": mode, "coordinate_transformation_mode": coordinates})
        for mode in ("nearest", "linear", "cubic")
        for coordinates in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
    ],
    ("Resize", 13, 23, [(1, 1, 4, 6), None, None, ints(1, 1, 7, 5)], {"mode": "linear"}),
    *[("Resize", 13, 23, [(1, 2, 5, 7), None, floats(1, 1, 1.3, 0.6)], {"mode": mode}) for mode in ("nearest", "linear", "cubic")],
    ("Resize", 18, 23, [(1, 2, 8, 9), None, floats(0.6, 0.4)], {"mode": "linear", "antialias": 1, "axes": [2, 3]}),
    ("Resize", 18, 23, [(1, 2, 8, 9), None, None, ints(5, 6)], {"axes": [3, 2], "keep_aspect_ratio_policy": "not_larger"}),
    (
        "ConvTranspose",
        7,
        23,
        [(1, 4, 4, 3), (4, 3, 3, 2), (6,)],
        {"strides": [2, 3], "group": 2, "pads": [1, 0, 0, 1], "dilations": [1, 2]},
    ),
    ("ConvTranspose", 7, 23, [(1, 4, 4), (4, 3, 2)], {"strides": [3]}),
    ("ConvTranspose", 7, 23, [(1, 2, 4, 3), noise(2, 3, 3, 2)], {"strides": [2, 2], "output_shape": [8, 6]}),
    ("Col2Im", 18, 23, [(1, 8, 4), ints(4, 5), ints(2, 2)], {"strides": [2, 3]}),
    *[("DFT", 17, 19, [(2, 6, 5, parts)], {"axis": 2, "inverse": inverse}) for parts in (1, 2) for inverse in (0, 1)],
    ("DFT", 20, 23, [(2, 6, 1), ints(8)[0]], {"onesided": 1}),
    ("STFT", 17, 23, [(1, 40), ints(6)[0], noise(16)], {"onesided": 1}),
    *[("LpNormalization", 7, 21, [(2, 3, 4)], {"p": p, "axis": 1}) for p in (1, 2)],
    ("SpaceToDepth", 7, 23, [(1, 2, 4, 6)], {"blocksize": 2}),
    ("ReverseSequence", 10, 23, [(4, 3, 2), ints(1, 4, 2)], {}),
    ("Celu", 12, 23, [(3, 4)], {"alpha": 0.5}),
    *[(operator, 9, 21, [(3, 4)], {}) for operator in ("Sinh", "Cosh")],
    ("BatchNormalization", 7, 23, [(2, 3, 4), *[np.abs(noise(3)) for _ in range(4)]], {}),
]


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 18, 23])
def test_operators_of_an_operator_set(opset):
    """One model with every case as an output, so that it compiles once."""
    nodes, inputs, constants, outputs = [], [], [], []
    for case, (operator, first, last, operands, attributes) in enumerate(CASES):
        if not first <= opset <= last:
            continue
        names = []
        for position, operand in enumerate(operands):
            names.append("" if operand is None else f"{operator}_{case}_{position}")
            if isinstance(operand, tuple):
                inputs.append(helper.make_tensor_value_info(names[-1], TensorProto.FLOAT, operand))
            elif operand is not None:
                constants.append(numpy_helper.from_array(np.asarray(operand), names[-1]))
        result = f"{operator}_{case}"
        nodes.append(helper.make_node(operator, names, [result], **attributes))
        outputs.append(helper.make_tensor_value_info(result, TensorProto.FLOAT, [None] * len(operands[0])))
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    assert_matches(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10), tolerance=2e-5)


@pytest.mark.parametrize("size", [4, 5])
def test_local_response_normalisation_is_one_kernel(size):
    """ONNX Runtime refuses windows of even size; ONNX lets them reach one channel further up than down."""
    node = helper.make_node("LRN", ["x"], ["y"], size=size, alpha=0.5, bias=1.5)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 7, 3, 3)) for name in "xy")
    proto = helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=[helper.make_opsetid("", 13)], ir_version=10)
    session = tvmfuse.build(proto)
    assert session.kernel_count == 1
    values = RNG.standard_normal((1, 7, 3, 3)).astype(np.float32)
    padded = np.pad(values.astype(np.float64), ((0, 0), ((size - 1) // 2, size // 2), (0, 0), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, size, 1)
    expected = values / (1.5 + 0.5 / size * (windows**2).sum(-1)) ** 0.75
    np.testing.assert_allclose(session.run(None, {"x": values})[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [3, 2], "pads": [1, 0, 2, 1], "strides": [2, 1]},
        {"kernel_shape": [2, 2], "dilations": [2, 3], "storage_order": 1},
        {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1, "pads": [1, 1, 1, 1]},
        {"kernel_shape": [1, 1], "strides": [2, 2]},
        {"kernel_shape": [2, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    ],
    ids=["pads", "columns first", "ceil", "one element", "same"],
)
def test_maxima_with_their_places(attributes):
    node = helper.make_node("MaxPool", ["x"], ["y", "places"], **attributes)
    outputs = [
        helper.make_tensor_value_info(name, kind, "nchw") for name, kind in (("y", TensorProto.FLOAT), ("places", TensorProto.INT64))
    ]
    graph = helper.make_graph([node], "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, (2, 3, 7, 8))], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    x = RNG.integers(-3, 3, (2, 3, 7, 8)).astype(np.float32)  # many are equal: the first counts
    x[0, 0] = -np.inf
    wanted = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    found = tvmfuse.build(model, threads=1).run(None, {"x": x})
    np.testing.assert_array_equal(found[0], wanted[0])
    np.testing.assert_array_equal(found[1][:, 1:], wanted[1][:, 1:])
    inside = found[1][0, 0]
    assert ((0 <= inside) & (inside < 56)).all(), "the place of a maximum that is -inf lies in the image too"


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_powers_of_whole_numbers(kind):
    base, exponent = np.arange(-4, 5).reshape(-1, 1), np.array([0, 1, 2, 3, 64, 65, -1, -2])
    text = f"({kind}[{len(base)},1] x, int64[8] e) => ({kind}[{len(base)},8] y) {{ y = Pow(x, e) }}"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    (y,) = tvmfuse.build(model, threads=1).run(None, {"x": base.astype(kind), "e": exponent})
    exact = [[b**e if e >= 0 else {0: 0, 1: 1, -1: (-1) ** -e}.get(b, 0) for e in exponent.tolist()] for b in base[:, 0].tolist()]
    for computed, right in zip(y.ravel().tolist(), sum(exact, []), strict=True):
        assert computed == right or abs(right) > 255
