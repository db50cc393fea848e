"""FoldAffine: which constants go into the weights, how they are rounded, and what is looked through."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import relax as R

from tvmfuse.graph.affine import FoldAffine
from tvmfuse.graph.rewrite import op_name

W = np.float32([[0.1, 0.7], [1.3, -0.2], [0.9, 0.4]])  # (co, ci)
B, S, T = np.float32([0.3, -1.7, 2.1]), np.float32([1.1, 0.3, -2.7]), np.float32([0.01, 5.0, -0.6])
GAMMA, BETA, MEAN, VAR = np.float32([[1.1, 0.9, 2.0], [0.1, -0.3, 0.5], [0.2, 1.5, -0.4], [0.5, 2.2, 0.05]])


def c(array: np.ndarray) -> relax.Expr:
    return relax.const(np.asarray(array, "float32"))


def channelwise(array: np.ndarray) -> relax.Expr:
    return c(array.reshape(1, -1, 1, 1))


def function_of(shape: tuple[int, ...], body: object, also_returned: str | None = None) -> relax.Function:
    """x -> body(emit, x), as one dataflow block; `also_returned` names a binding that becomes an output too."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType(shape, "float32"))
    with builder.function("main", [x], private=True):
        with builder.dataflow():
            emitted: dict[str, relax.Var] = {}

            def emit(value: relax.Expr, name: str = "") -> relax.Var:
                emitted[name] = builder.emit(value, name)
                return emitted[name]

            outputs = [builder.emit_output(body(emit, x))]
            if also_returned:
                outputs.append(builder.emit_output(emitted[also_returned]))
        builder.emit_func_output(outputs if also_returned else outputs[0])
    return builder.get()["main"]


def values(function: relax.Function) -> list[relax.Expr]:
    once = FoldAffine()(tvm.IRModule({"main": function}))
    tvm.ir.assert_structural_equal(FoldAffine()(once), once)
    return [binding.value for binding in once["main"].body.blocks[0].bindings]


def names(function: relax.Function) -> list[str]:
    return [op_name(value) for value in values(function) if op_name(value)]


def number(value: relax.Expr) -> np.ndarray:
    return value.value.numpy()


def conv(x: relax.Expr, weights: np.ndarray = W) -> relax.Expr:
    return relax.op.nn.conv2d(x, c(weights.reshape(3, 2, 1, 1)))


def norm(emit, x: relax.Expr) -> relax.Expr:
    return relax.TupleGetItem(emit(relax.op.nn.batch_norm(x, c(GAMMA), c(BETA), c(MEAN), c(VAR), axis=1, training=False)), 0)


def test_a_bias_two_scales_and_a_batch_norm_are_rounded_once() -> None:
    def body(emit, x):
        biased = emit(relax.op.add(emit(conv(x)), channelwise(B)))
        normal = emit(norm(emit, biased))
        return relax.op.divide(emit(relax.op.subtract(channelwise(T), normal)), channelwise(S))

    convolution, bias = values(function_of((1, 2, 1, 1), body))
    wide = [array.astype("float64") for array in (W, B, S, T, GAMMA, BETA, MEAN, VAR)]
    w, b, s, t, gamma, beta, mean, var = wide
    slope = gamma / np.sqrt(var + 1e-5)
    np.testing.assert_array_equal(number(convolution.args[1]).reshape(3, 2), (w * (-slope / s)[:, None]).astype("float32"))
    expected = (t - ((b - mean) * slope + beta)) / s
    np.testing.assert_allclose(number(bias.args[1]).ravel(), expected, rtol=2e-7)


def test_a_bias_alone_stays_as_it_is() -> None:
    function = function_of((1, 2, 1, 1), lambda emit, x: relax.op.add(channelwise(B), emit(conv(x))))
    tvm.ir.assert_structural_equal(FoldAffine()(tvm.IRModule({"main": function}))["main"], function)


def test_a_matmul_takes_what_varies_along_its_columns() -> None:
    def body(emit, x):
        return relax.op.multiply(emit(relax.op.add(emit(relax.op.matmul(x, c(W.T))), c(B))), c(S))

    product, bias = values(function_of((4, 2), body))
    np.testing.assert_array_equal(number(product.args[1]), (W.T.astype("float64") * S).astype("float32"))
    np.testing.assert_array_equal(number(bias.args[1]), (B.astype("float64") * S).astype("float32")[None])


def test_a_batched_matmul_takes_what_varies_along_its_batches() -> None:
    scales = np.float32([[[2.0]], [[3.0]]])
    weights = np.stack([W.T, W.T])
    (product,) = values(function_of((2, 4, 2), lambda emit, x: relax.op.multiply(emit(relax.op.matmul(x, c(weights))), c(scales))))
    np.testing.assert_array_equal(number(product.args[1]), weights * scales)


def test_a_scalar_before_a_matmul_goes_into_its_weights() -> None:
    (product,) = values(function_of((4, 2), lambda emit, x: relax.op.matmul(emit(relax.op.multiply(x, c(0.5))), c(W.T))))
    np.testing.assert_array_equal(number(product.args[1]), W.T * 0.5)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_is_scaled_along_its_output_channels(groups: int) -> None:
    weights = np.arange(1, 4 * (4 // groups) + 1, dtype="float32").reshape(4, 4 // groups, 1, 1)
    scales = np.float32([2, 3, 5, 7])

    def body(emit, x):
        return relax.op.multiply(emit(relax.op.nn.conv2d_transpose(x, c(weights), groups=groups)), channelwise(scales))

    (convolution,) = values(function_of((1, 4, 1, 1), body))
    per_group = scales.reshape(groups, 1, -1)
    expected = weights.reshape(groups, 4 // groups, -1) * per_group
    np.testing.assert_array_equal(number(convolution.args[1]).ravel(), expected.ravel())


def test_without_an_anchor_a_chain_is_one_multiply_and_one_add() -> None:
    def body(emit, x):
        return relax.op.add(emit(relax.op.multiply(emit(norm(emit, x)), channelwise(S))), channelwise(T))

    multiply, add = values(function_of((1, 3, 2, 2), body))
    slope = GAMMA.astype("float64") / np.sqrt(VAR.astype("float64") + 1e-5) * S
    np.testing.assert_array_equal(number(multiply.args[1]).ravel(), slope.astype("float32"))
    assert op_name(add) == "add"


def test_without_an_anchor_as_many_operations_keep_their_rounding() -> None:
    function = function_of((2, 3), lambda emit, x: relax.op.divide(emit(relax.op.subtract(x, c(T))), c(S)))
    tvm.ir.assert_structural_equal(FoldAffine()(tvm.IRModule({"main": function}))["main"], function)


def test_refuses_when_the_intermediate_is_a_graph_output() -> None:
    def body(emit, x):
        return relax.op.multiply(emit(conv(x), "raw"), channelwise(S))

    assert names(function_of((1, 2, 1, 1), body)) == ["nn.conv2d"]
    assert names(function_of((1, 2, 1, 1), body, also_returned="raw")) == ["nn.conv2d", "multiply"]


def test_refuses_when_the_intermediate_has_a_second_user() -> None:
    def body(emit, x):
        raw = emit(conv(x))
        return relax.op.add(emit(relax.op.multiply(raw, channelwise(S))), emit(relax.op.nn.relu(raw)))

    assert names(function_of((1, 2, 1, 1), body)) == ["nn.conv2d", "multiply", "nn.relu", "add"]


def test_refuses_a_scale_along_another_axis() -> None:
    def along_w(emit, x):
        return relax.op.multiply(emit(conv(x)), c([[[[1.0, 2.0, 3.0]]]]))

    def along_m(emit, x):
        return relax.op.multiply(emit(relax.op.matmul(x, c(W.T))), c([[1.0], [2.0], [3.0]]))

    assert names(function_of((1, 2, 1, 3), along_w)) == ["nn.conv2d", "multiply"]
    assert names(function_of((3, 2), along_m)) == ["matmul", "multiply"]


def test_refuses_to_look_through_an_activation() -> None:
    function = function_of((1, 2, 1, 1), lambda emit, x: relax.op.multiply(emit(relax.op.nn.relu(emit(conv(x)))), channelwise(S)))
    assert names(function) == ["nn.conv2d", "nn.relu", "multiply"]


def test_refuses_a_constant_that_broadcasts_the_result_up() -> None:
    function = function_of((1, 2), lambda emit, x: relax.op.multiply(emit(relax.op.matmul(x, c(W.T))), c([[2.0], [3.0]])))
    assert names(function) == ["matmul", "multiply"]


@pytest.mark.parametrize("factor", [np.inf, np.nan])
def test_refuses_constants_that_are_not_finite(factor: float) -> None:
    function = function_of((1, 2, 1, 1), lambda emit, x: relax.op.multiply(emit(conv(x)), c(factor)))
    assert names(function) == ["nn.conv2d", "multiply"]


def test_refuses_to_divide_by_zero() -> None:
    function = function_of((1, 2, 1, 1), lambda emit, x: relax.op.divide(emit(conv(x)), c(0.0)))
    assert names(function) == ["nn.conv2d", "divide"]


def test_refuses_a_batch_norm_in_training() -> None:
    def body(emit, x):
        return relax.TupleGetItem(emit(relax.op.nn.batch_norm(emit(conv(x)), c(GAMMA), c(BETA), c(MEAN), c(VAR), axis=1, training=True)), 0)

    assert names(function_of((1, 2, 1, 1), body)) == ["nn.conv2d", "nn.batch_norm"]


def test_a_batch_norm_hands_on_its_running_statistics() -> None:
    def body(emit, x):
        return relax.TupleGetItem(emit(relax.op.nn.batch_norm(x, c(GAMMA), c(BETA), c(MEAN), c(VAR), axis=1, training=False)), 1)

    (mean,) = values(function_of((1, 3, 1, 1), body))
    np.testing.assert_array_equal(number(mean), MEAN)


def test_integers_are_left_alone() -> None:
    @R.function(private=True)
    def before(x: R.Tensor((2,), "int64")):
        with R.dataflow():
            a = R.add(x, R.const([1, 2], "int64"))
            y = R.add(a, R.const([3, 4], "int64"))
            R.output(y)
        return y

    tvm.ir.assert_structural_equal(FoldAffine()(tvm.IRModule({"main": before}))["main"], before)
