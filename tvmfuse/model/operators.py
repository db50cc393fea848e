"""Where TVM's converters are replaced or refused, and why.

CONVERTERS  ours, used instead of TVM's or where it has none; each says what TVM lacks. Most of TVM's that are replaced call `emit_te`: the
            operator is then a PrimFunc of its own, invisible to every Relax pass that follows.
REFUSALS    conditions under which TVM's converter gives another result than ONNX, found by comparing it with ONNX's node tests.
SINCE       which declarations of an operator, newer than operator set 23, mean what the converters make.

Faults of TVM 0.27 that lie elsewhere, and where they are met:

    average pooling of few channels fails LLVM's verifier     graph/layout.py: channels last, one channel by a window of its own
    Reshape, Expand, Tile to a shape known at run time only   fold.py: shapes are folded; what stays data-dependent is refused
    Resize where a scale leads to fractions of an element     resize.py: by a matrix of weights
    If with reshapes in its branches                          fold.py: the branch that is taken; a condition on data is refused
    nested tuples in a function called fused                  kernel/generic.py fuses after operators have become single kernels
    Loop and Scan                                             unroll.py: steps of a known number
    Attention, CastLike, ... as other dialects define them    fold.py: taken apart as ONNX defines them
    a part or a tensor without elements                       fold.py: constants; as outputs refused
    transposed convolution with weights known at run time     conv_transpose.py: a convolution of a spread input
    quantised operators                                       quantized.py
    maxima with their places; SAME_LOWER of odd extents       max_pool.py
    powers, shifts and remainders of whole numbers            here
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnx
import tvm
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import LayerNormalization, RMSNormalization, Slice

from . import conv_transpose, fourier, max_pool, quantized, resize
from .fold import Graph, attributes
from .operands import Attributes, Converter, Operands, constant, operand

KNOWN_OPSET = 23  # what TVM's converters and ours were compared with ONNX Runtime on
# The operators that newer sets have declared again only to allow more types or to say more clearly what they do.
SINCE = {
    **dict.fromkeys(
        "Cast CastLike Constant ConstantOfShape Flatten Identity Pad Reshape Shape Size Squeeze Transpose Unsqueeze".split(), 25
    ),
    **dict.fromkeys("BitShift Cast Celu Compress DepthToSpace DequantizeLinear Einsum Mod OneHot QuantizeLinear".split(), 28),
    **dict.fromkeys("ReduceLogSum ReduceLogSumExp ReverseSequence SpaceToDepth Unique".split(), 28),
    "BitCast": 26,
    "CumProd": 26,
    "Range": 27,
    "Swish": 24,
    "TensorScatter": 24,
    "TopK": 24,
}


# Converters make several operations of these, of which each would round to float16, and some overflow it: they are computed in float32.
COMPOSED = frozenset(
    "Atanh Celu Cosh Elu Gelu GlobalLpPool GroupNormalization HardSigmoid HardSwish InstanceNormalization LRN LpNormalization LpPool Mean "
    "Mish ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceSumSquare Selu Shrink Sinh Softplus Softsign Sum Swish".split()
)


def _pairwise(op: Callable[[relax.Expr, relax.Expr], relax.Expr]) -> Converter:
    """TVM's stacks all operands and reduces, which hides a residual Sum from the passes that fuse it."""

    def convert(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
        return functools.reduce(lambda left, right: bb.emit(op(left, right)), operands)

    return convert


def _mean(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    total = _pairwise(relax.op.add)(bb, operands, attrs)
    return relax.op.divide(total, relax.const(len(operands), total.ty.dtype.dtype))


def _clip(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Bounds are attributes up to operator set 10, then operands. A NaN bound doesn't bind."""
    x = operands[0]
    dtype = x.ty.dtype.dtype
    bounds = []
    for index, name in ((1, "min"), (2, "max")):
        bound = relax.const(attrs[name], dtype) if name in attrs else operand(operands, index)
        value = constant(bound)
        bounds.append(None if value is not None and np.isnan(value) else bound)
    low, high = bounds
    values = [constant(bound) for bound in bounds]
    if all(value is not None for value in values) and values[0] <= values[1]:
        return relax.op.clip(x, *(relax.prim_value(tvm.tirx.const(value.item(), dtype)) for value in values))
    if low is not None:
        x = bb.emit(relax.op.maximum(x, low))
    return x if high is None else relax.op.minimum(x, high)


def _einsum(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    return relax.op.einsum(tuple(operands), attrs["equation"].decode())


def _gemm(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """alpha scales the product, where an epilogue can absorb it; TVM's scales A, a pass of its own."""
    a, b, c = operands[0], operands[1], operand(operands, 2)
    a = relax.op.permute_dims(a, (1, 0)) if attrs.get("transA") else a
    b = relax.op.permute_dims(b, (1, 0)) if attrs.get("transB") else b
    dtype = a.ty.dtype.dtype if hasattr(a.ty, "dtype") else operands[0].ty.dtype.dtype
    result = bb.emit(relax.op.matmul(a, b), attrs["tvm_custom"]["name"])
    if attrs.get("alpha", 1.0) != 1.0:
        result = bb.emit(relax.op.multiply(result, relax.const(attrs["alpha"], dtype)))
    if c is None:
        return result
    if attrs.get("beta", 1.0) != 1.0:
        c = bb.emit(relax.op.multiply(c, relax.const(attrs["beta"], dtype)))
    return relax.op.add(result, c)


def _lrn(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """The window as a sum of slices, which all becomes one kernel; TVM's takes a pool, a kernel apart, and has only windows of odd size.

    y = x / (bias + alpha / size * sum over the window's channels of x**2) ** beta
    """
    x, size = operands[0], attrs["size"]
    channels, *spatial = (int(extent) for extent in list(x.ty.shape)[1:])
    before = (size - 1) // 2
    wide = bb.emit(relax.op.nn.pad(x, [0, 0, before, size - 1 - before, *[0, 0] * len(spatial)]))
    squares = bb.emit(relax.op.multiply(wide, wide))
    shifted = [bb.emit(relax.op.strided_slice(squares, [1], [start], [start + channels])) for start in range(size)]
    mean = _mean(bb, shifted, attrs)
    dtype = x.ty.dtype.dtype
    scaled = bb.emit(relax.op.multiply(bb.emit(mean), relax.const(attrs.get("alpha", 1e-4), dtype)))
    scale = bb.emit(relax.op.add(scaled, relax.const(attrs.get("bias", 1.0), dtype)))
    return relax.op.divide(x, bb.emit(relax.op.power(scale, relax.const(attrs.get("beta", 0.75), dtype))))


def _pad(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Pads are attributes up to operator set 10, then operands; axes came with 18."""
    x = operands[0]
    rank = len(x.ty.shape)
    pads = attrs.get("pads") or constant(operand(operands, 1)).tolist()
    axes = constant(operand(operands, 3))
    axes = list(range(rank)) if axes is None else [int(axis) % rank for axis in axes]
    widths = [0] * (2 * rank)
    for position, axis in enumerate(axes):
        widths[2 * axis : 2 * axis + 2] = pads[position], pads[position + len(axes)]
    mode = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}[attrs.get("mode", b"constant").decode()]
    fill = operand(operands, 2)
    value = constant(fill)
    if min(widths) < 0:
        ends = [int(extent) + min(after, 0) for extent, after in zip(x.ty.shape, widths[1::2], strict=True)]
        begins = [max(-before, 0) for before in widths[::2]]
        x = bb.emit(relax.op.strided_slice(x, list(range(rank)), begins, ends))
        widths = [max(width, 0) for width in widths]
    if mode != "constant" or fill is None or value is not None:
        return relax.op.nn.pad(x, widths, mode, attrs.get("value", 0.0) if value is None else value.item())
    inside = np.pad(np.ones([int(extent) for extent in x.ty.shape], bool), list(zip(widths[::2], widths[1::2], strict=True)))
    return relax.op.where(relax.const(inside), relax.op.nn.pad(x, widths), relax.op.reshape(fill, []))


def _pow(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """The exponent may have another type than the base, which is the result's."""
    base, exponent = operands
    dtype = base.ty.dtype.dtype
    if "int" in str(dtype):
        return _whole_power(bb, base, exponent)
    value = constant(exponent)
    return relax.op.power(base, relax.op.astype(exponent, dtype) if value is None else relax.const(value, dtype))


def _whole_power(bb: relax.BlockBuilder, base: relax.Expr, exponent: relax.Expr) -> relax.Expr:
    """By squaring, modulo the type's range. Above 63 only powers of -1, 0 and 1 fit, and those depend on whether the exponent is odd;
    below 0 only those of -1 and 1 aren't fractions, which become 0."""
    dtype = base.ty.dtype.dtype
    zero, one = relax.const(0, dtype), relax.const(1, dtype)
    exponent = bb.emit(relax.op.astype(exponent, "int64"))
    negative = bb.emit(relax.op.less(exponent, relax.const(0, "int64")))
    odd = bb.emit(relax.op.bitwise_and(exponent, relax.const(1, "int64")))
    beyond = bb.emit(relax.op.logical_or(negative, relax.op.greater(exponent, relax.const(63, "int64"))))
    bits = bb.emit(relax.op.where(beyond, bb.emit(relax.op.add(odd, relax.const(62, "int64"))), exponent))
    result, square = one, base
    for bit in range(6):
        is_set = relax.op.bitwise_and(relax.op.right_shift(bits, relax.const(bit, "int64")), relax.const(1, "int64"))
        factor = bb.emit(relax.op.where(bb.emit(relax.op.astype(bb.emit(is_set), "bool")), square, one))
        result, square = bb.emit(relax.op.multiply(result, factor)), bb.emit(relax.op.multiply(square, square))
    unit = bb.emit(relax.op.logical_or(relax.op.equal(base, one), relax.op.equal(base, relax.const(-1, dtype))))
    fits = bb.emit(relax.op.logical_or(bb.emit(relax.op.logical_not(negative)), unit))
    return relax.op.where(fits, result, zero)


def _reduced(op: Callable[..., relax.Expr]) -> Converter:
    """Axes are an attribute up to operator set 17, then an operand. Booleans are compared as numbers; TVM has no limits of them."""

    def convert(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
        x, given = operands[0], operand(operands, 1)
        axes = attrs.get("axes") if given is None else constant(given).tolist()
        if not axes and attrs.get("noop_with_empty_axes"):
            return x
        truth = str(x.ty.dtype.dtype) == "bool"
        data = bb.emit(relax.op.astype(x, "int8")) if truth else x
        result = op(data, axes or None, bool(attrs.get("keepdims", 1)))
        return relax.op.astype(bb.emit(result), "bool") if truth else result

    return convert


def _tensor_scatter(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """A cache with an update written into it, for each batch from its own position on along `axis`; "circular" goes on at the start."""
    cache, update, begins = operands[0], operands[1], operand(operands, 2)
    shape = [int(extent) for extent in cache.ty.shape]
    axis = attrs.get("axis", -2) % len(shape)
    along = [-1 if at == axis else 1 for at in range(len(shape))]
    offsets = relax.const(np.arange(shape[axis]).reshape(along), "int64")
    if begins is not None:
        first = bb.emit(relax.op.reshape(bb.emit(relax.op.astype(begins, "int64")), (shape[0], *[1] * (len(shape) - 1))))
        offsets = bb.emit(relax.op.subtract(offsets, first))
    if attrs.get("mode", b"linear") == b"circular":
        offsets = bb.emit(relax.op.floor_mod(offsets, relax.const(shape[axis], "int64")))
    last = relax.const(int(update.ty.shape[axis]) - 1, "int64")
    inside = bb.emit(relax.op.logical_and(relax.op.greater_equal(offsets, relax.const(0, "int64")), relax.op.less_equal(offsets, last)))
    within = bb.emit(relax.op.minimum(bb.emit(relax.op.maximum(offsets, relax.const(0, "int64"))), last))
    taken = bb.emit(relax.op.gather_elements(update, bb.emit(relax.op.broadcast_to(within, shape)), axis))
    return relax.op.where(inside, taken, cache)


def _slice(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Up to operator set 9 the limits are attributes; TVM reads operands only."""
    starts, ends, axes, steps = (operand(operands, index) for index in range(1, 5))
    if "starts" in attrs:
        starts, ends = attrs["starts"], attrs["ends"]
        axes = attrs.get("axes", range(len(starts)))
        return relax.op.strided_slice(operands[0], list(axes), list(starts), list(ends))
    return Slice._impl_v13(bb, [operands[0], starts, ends, axes, steps], attrs, ({}, {}))


def _thresholded_relu(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """TVM's multiplies by 0, which makes NaN of -inf."""
    (x,) = operands
    dtype = x.ty.dtype.dtype
    return relax.op.where(relax.op.greater(x, relax.const(attrs.get("alpha", 1.0), dtype)), x, relax.const(0.0, dtype))


def _elu(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """x > 0 ? x : alpha * (e**x - 1). TVM's subtracts two relus, which loses NaN, and has constants of float32 only."""
    (x,) = operands
    dtype = x.ty.dtype.dtype
    below = relax.op.multiply(relax.op.subtract(relax.op.exp(x), relax.const(1.0, dtype)), relax.const(attrs.get("alpha", 1.0), dtype))
    return relax.op.where(relax.op.greater(x, relax.const(0.0, dtype)), x, below)


def _selu(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """gamma * elu(x), with ONNX's defaults."""
    (x,) = operands
    alpha, gamma = attrs.get("alpha", 1.6732632423543772), attrs.get("gamma", 1.0507009873554805)
    return relax.op.multiply(bb.normalize(_elu(bb, operands, {"alpha": alpha})), relax.const(gamma, x.ty.dtype.dtype))


def _layer_norm(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """TVM legalises its own for float32 and float16 only, and without mean and deviation as results; else it is written out."""
    x, scale, bias = operands[0], operands[1], operand(operands, 2)
    dtype = x.ty.dtype.dtype
    if str(dtype) != "float64" and attrs["tvm_custom"]["num_outputs"] == 1:
        return LayerNormalization._impl_v17(bb, [x, scale, bias], attrs, ({}, {}))
    rank = len(x.ty.shape)
    axes = list(range(attrs.get("axis", -1) % rank, rank))
    wide = "float32" if str(dtype) == "float16" else dtype
    x = bb.emit(relax.op.astype(x, wide)) if wide != dtype else x
    mean = bb.emit(relax.op.mean(x, axes, keepdims=True))
    centred = bb.emit(relax.op.subtract(x, mean))
    variance = bb.emit(relax.op.mean(relax.op.multiply(centred, centred), axes, keepdims=True))
    spread = bb.emit(relax.op.sqrt(relax.op.add(variance, relax.const(attrs.get("epsilon", 1e-5), wide))))
    normal = bb.emit(relax.op.astype(relax.op.divide(centred, spread), dtype))
    scaled = bb.emit(relax.op.multiply(normal, scale))
    inverse = bb.emit(relax.op.divide(relax.const(1, wide), spread))
    return relax.Tuple([scaled if bias is None else bb.emit(relax.op.add(scaled, bias)), mean, inverse])


def _gather(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Indices from -extent to extent - 1. Others are an error in ONNX; TVM's would read whatever lies there, this the nearest element."""
    data, indices = operands
    axis = attrs.get("axis", 0)
    dtype = indices.ty.dtype.dtype
    if (known := constant(indices)) is not None:
        return relax.op.take(data, relax.const(np.where(known < 0, known + int(data.ty.shape[axis]), known), dtype), axis, mode="clip")
    extent = relax.const(int(data.ty.shape[axis]), dtype)
    from_end = relax.op.less(indices, relax.const(0, dtype))
    return relax.op.take(data, relax.op.where(from_end, relax.op.add(indices, extent), indices), axis, mode="clip")


def _bit_shift(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """By less than the width, as TVM defines it; beyond, what extending the sign alone gives."""
    x, by = operands
    dtype = x.ty.dtype.dtype
    bits = np.iinfo(str(dtype)).bits
    last = relax.const(bits - 1, dtype)
    inside = relax.op.logical_and(relax.op.greater_equal(by, relax.const(0, dtype)), relax.op.less_equal(by, last))
    right = attrs["direction"] == b"RIGHT"
    shifted = (relax.op.right_shift if right else relax.op.left_shift)(x, bb.emit(relax.op.where(inside, by, last)))
    beyond = relax.op.right_shift(x, last) if right and str(dtype).startswith("int") else relax.const(0, dtype)
    return relax.op.where(inside, bb.emit(shifted), beyond)


def _mod(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """fmod=0 takes the divisor's sign, also of zeros, and an infinite divisor, neither of which a - floor(a / b) * b gives."""
    a, b = operands
    dtype = a.ty.dtype.dtype
    if attrs.get("fmod"):
        return relax.op.mod(a, b)
    if "float" not in str(dtype):
        return relax.op.floor_mod(a, b)
    zero = relax.const(0.0, dtype)
    rest = bb.emit(relax.op.mod(a, b))
    differs = relax.op.logical_xor(relax.op.less(rest, zero), relax.op.less(b, zero))
    moved = relax.op.where(differs, relax.op.add(rest, b), rest)
    nothing = relax.op.where(relax.op.less(b, zero), relax.const(-0.0, dtype), zero)
    return relax.op.where(relax.op.equal(rest, zero), nothing, bb.emit(moved))


def _is_inf(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    (x,) = operands
    dtype = x.ty.dtype.dtype
    signs = [sign for sign, name in ((1, "detect_positive"), (-1, "detect_negative")) if attrs.get(name, 1)]
    found = [relax.op.equal(x, relax.const(sign * np.inf, dtype)) for sign in signs]
    return functools.reduce(relax.op.logical_or, found) if found else relax.op.full_like(x, relax.const(False), "bool")


def _softplus(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """One operation. TVM's adds 1 to e**-|x| before it takes the logarithm, which leaves nothing of small ones."""
    return relax.op.nn.softplus(operands[0])


def _mish(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """x * tanh(softplus(x))."""
    (x,) = operands
    return relax.op.multiply(x, relax.op.tanh(bb.emit(relax.op.nn.softplus(x))))


def _swish(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """x * sigmoid(alpha * x)."""
    (x,) = operands
    alpha = relax.const(attrs.get("alpha", 1.0), x.ty.dtype.dtype)
    return relax.op.multiply(x, relax.op.sigmoid(bb.emit(relax.op.multiply(x, alpha))))


def _celu(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """x > 0 ? x : alpha * (e**(x / alpha) - 1)."""
    (x,) = operands
    dtype = x.ty.dtype.dtype
    alpha, zero, one = (relax.const(value, dtype) for value in (attrs.get("alpha", 1.0), 0.0, 1.0))
    below = relax.op.multiply(alpha, relax.op.subtract(relax.op.exp(relax.op.divide(x, alpha)), one))
    return relax.op.where(relax.op.greater(x, zero), x, below)


def _hyperbolic(sign: int) -> Converter:
    """(e**x + e**-x) / 2 and (e**x - e**-x) / 2: LLVM has neither. Small |x| of sinh is a series, where the difference cancels.

    e**x overflows before the results do, so it is e**(x - 23/32) * (e**(23/32) / 2): exact from 1 on, and a factor that is off by a
    64th of a float32's last place.
    """

    def convert(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
        (x,) = operands
        dtype = x.ty.dtype.dtype
        one, shift, factor = (relax.const(value, dtype) for value in (1.0, 23 / 32, np.exp(23 / 32) / 2))
        arguments = [bb.emit(relax.op.subtract(value, shift)) for value in (x, bb.emit(relax.op.negative(x)))]
        halves = [bb.emit(relax.op.multiply(relax.op.exp(value), factor)) for value in arguments]
        if sign > 0:
            return relax.op.add(*halves)
        square = bb.emit(relax.op.multiply(x, x))
        series = one
        for k in range(18, 0, -2):
            factor = relax.op.multiply(square, relax.const(1 / (k * (k + 1)), dtype))
            series = bb.emit(relax.op.add(one, relax.op.multiply(factor, series)))
        near = relax.op.less(relax.op.abs(x), one)
        return relax.op.where(near, relax.op.multiply(x, series), relax.op.subtract(*halves))

    return convert


def _cum_prod(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    x, axis = operands[0], constant(operands[1])
    dtype, axis = x.ty.dtype.dtype, int(axis.item()) % len(x.ty.shape)
    x = bb.emit(relax.op.flip(x, axis)) if attrs.get("reverse") else x
    if attrs.get("exclusive"):  # moved by one, a 1 before
        rank, extent = len(x.ty.shape), int(x.ty.shape[axis])
        kept = relax.op.strided_slice(x, [axis], [0], [extent - 1])
        widths = [0] * (2 * rank)
        widths[2 * axis] = 1
        x = bb.emit(relax.op.nn.pad(bb.emit(kept), widths, "constant", 1.0))
    product = bb.emit(relax.op.cumprod(x, axis, dtype))
    return relax.op.flip(product, axis) if attrs.get("reverse") else product


def _lp_normalization(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """x / |x|, and 0 where the norm is."""
    (x,) = operands
    dtype, axis = x.ty.dtype.dtype, attrs.get("axis", -1)
    sizes = relax.op.abs(x) if attrs.get("p", 2) == 1 else relax.op.multiply(x, x)
    norm = bb.emit(relax.op.sum(bb.emit(sizes), axis, keepdims=True))
    norm = norm if attrs.get("p", 2) == 1 else bb.emit(relax.op.sqrt(norm))
    zero, one = relax.const(0.0, dtype), relax.const(1.0, dtype)
    empty = bb.emit(relax.op.equal(norm, zero))
    return relax.op.where(empty, zero, relax.op.divide(x, relax.op.where(empty, one, norm)))


def _reverse_sequence(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    x, lengths = operands
    return relax.op.reverse_sequence(x, lengths, seq_axis=attrs.get("time_axis", 0), batch_axis=attrs.get("batch_axis", 1))


def _space_to_depth(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    (x,) = operands
    n, c, h, w = (int(extent) for extent in x.ty.shape)
    size = attrs["blocksize"]
    blocks = bb.emit(relax.op.reshape(x, (n, c, h // size, size, w // size, size)))
    order = (0, 1, 3, 5, 2, 4) if attrs.get("mode") == b"CRD" else (0, 3, 5, 1, 2, 4)
    return relax.op.reshape(bb.emit(relax.op.permute_dims(blocks, order)), (n, c * size * size, h // size, w // size))


def _bit_cast(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    (x,) = operands
    dtype = str(onnx.helper.tensor_dtype_to_np_dtype(attrs["to"]))
    if dtype == "bool" or str(x.ty.dtype.dtype) == "bool":
        return relax.op.astype(x, dtype)

    def reinterpreted(source: tvm.te.Tensor) -> tvm.te.Tensor:
        return tvm.te.compute(source.shape, lambda *at: tvm.tirx.reinterpret(dtype, source(*at)), "bits")

    return bb.emit_te(reinterpreted, x)


def _split(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """TVM's loops can't be compiled where a part has no elements."""
    x, axis = operands[0], attrs.get("axis", 0) % len(operands[0].ty.shape)
    extent, count = int(x.ty.shape[axis]), attrs["tvm_custom"]["num_outputs"]
    given = attrs.get("split", constant(operand(operands, 1)))
    share = -(-extent // count)
    sizes = [min(share, extent - share * i) for i in range(count)] if given is None else [int(size) for size in given]
    ends = np.cumsum(sizes).tolist()
    if min(sizes) > 0:
        return bb.normalize(relax.op.split(x, ends[:-1], axis))
    empty = [0 if position == axis else int(extent) for position, extent in enumerate(x.ty.shape)]
    parts = [
        bb.emit(relax.op.strided_slice(x, [axis], [end - size], [end])) if size else relax.const(np.zeros(empty), x.ty.dtype.dtype)
        for end, size in zip(ends, sizes, strict=True)
    ]
    return relax.Tuple(parts)


def _one_hot(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Also of values that aren't constant. Indices from -depth to depth - 1; others match nothing."""
    indices, depth, values = operands
    count, rank = int(constant(depth).item()), len(indices.ty.shape)
    axis = attrs.get("axis", -1) % (rank + 1)
    at = bb.emit(relax.op.expand_dims(bb.emit(relax.op.astype(indices, "int64")), axis))
    numbers = np.arange(count).reshape([-1 if position == axis else 1 for position in range(rank + 1)])
    from_end = bb.emit(relax.op.where(relax.op.less(at, relax.const(0, "int64")), relax.op.add(at, relax.const(count, "int64")), at))
    off, on = (bb.emit(relax.op.reshape(bb.emit(relax.op.strided_slice(values, [0], [i], [i + 1])), ())) for i in (0, 1))
    return relax.op.where(bb.emit(relax.op.equal(from_end, relax.const(numbers, "int64"))), on, off)


def _rms_norm(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """TVM's fails over every axis, and knows float32 and float16; else it is written out."""
    x, scale = operands
    dtype, rank = x.ty.dtype.dtype, len(x.ty.shape)
    if attrs.get("axis", -1) % rank and str(dtype) != "float64":
        return RMSNormalization._impl_v23(bb, operands, attrs, ({}, {}))
    wide = "float32" if str(dtype) == "float16" else str(dtype)
    data = bb.emit(relax.op.astype(x, wide)) if wide != str(dtype) else x
    axes = list(range(attrs.get("axis", -1) % rank, rank))
    square = bb.emit(relax.op.mean(bb.emit(relax.op.multiply(data, data)), axes, keepdims=True))
    root = bb.emit(relax.op.sqrt(relax.op.add(square, relax.const(attrs.get("epsilon", 1e-5), wide))))
    normal = bb.emit(relax.op.divide(data, root))
    return relax.op.multiply(bb.emit(relax.op.astype(normal, dtype)) if wide != str(dtype) else normal, scale)


def _unsqueeze(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """Axes are an attribute up to operator set 12, then an operand; ONNX's own AffineGrid gives one without an axis."""
    axes = attrs["axes"] if "axes" in attrs else np.atleast_1d(constant(operands[1])).tolist()
    return relax.op.expand_dims(operands[0], [int(axis) for axis in axes])


def _equal(bb: relax.BlockBuilder, operands: Operands, attrs: Attributes) -> relax.Expr:
    """LLVM refuses TVM's code for booleans that differ."""
    a, b = operands
    return relax.op.logical_not(relax.op.logical_xor(a, b)) if str(a.ty.dtype.dtype) == "bool" else relax.op.equal(a, b)


CONVERTERS: dict[str, Converter] = {
    "BitCast": _bit_cast,
    "BitShift": _bit_shift,
    "Celu": _celu,
    "Clip": _clip,
    "Col2Im": conv_transpose.col2im,
    "ConvInteger": quantized.conv_integer,
    "ConvTranspose": conv_transpose.convert,
    "Cosh": _hyperbolic(1),
    "CumProd": _cum_prod,
    "DFT": fourier.dft,
    "DequantizeLinear": quantized.dequantize,
    "Einsum": _einsum,
    "Elu": _elu,
    "Equal": _equal,
    "Gather": _gather,
    "Gemm": _gemm,
    "IsInf": _is_inf,
    "LRN": _lrn,
    "LayerNormalization": _layer_norm,
    "LpNormalization": _lp_normalization,
    "MatMulInteger": quantized.matmul_integer,
    "Max": _pairwise(relax.op.maximum),
    "MaxPool": max_pool.convert,
    "Mean": _mean,
    "Min": _pairwise(relax.op.minimum),
    "Mish": _mish,
    "Mod": _mod,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Pow": _pow,
    "QLinearConv": quantized.qlinear_conv,
    "QLinearMatMul": quantized.qlinear_matmul,
    "QuantizeLinear": quantized.quantize,
    "Resize": resize.convert,
    "RMSNormalization": _rms_norm,
    "ReduceMax": _reduced(relax.op.max),
    "ReduceMin": _reduced(relax.op.min),
    "ReverseSequence": _reverse_sequence,
    "STFT": fourier.stft,
    "Selu": _selu,
    "Sinh": _hyperbolic(-1),
    "Slice": _slice,
    "Softplus": _softplus,
    "SpaceToDepth": _space_to_depth,
    "Split": _split,
    "Sum": _pairwise(relax.op.add),
    "Swish": _swish,
    "TensorScatter": _tensor_scatter,
    "ThresholdedRelu": _thresholded_relu,
    "Unsqueeze": _unsqueeze,
    "Upsample": resize.upsample,
}


def _why_not_batch_norm(node: onnx.NodeProto, attrs: Attributes, graph: Graph) -> str | None:
    if attrs.get("training_mode"):
        return "training_mode=1"
    return None if attrs.get("spatial", 1) else "spatial=0"


def _why_not_pow(node: onnx.NodeProto, attrs: Attributes, graph: Graph) -> str | None:
    whole = "int" in (graph.dtype(node.input[0]) or "")
    return "a power of integers by a fraction" if whole and "float" in (graph.dtype(node.input[1]) or "") else None


def _why_not_top_k(node: onnx.NodeProto, attrs: Attributes, graph: Graph) -> str | None:
    dtype = graph.dtype(node.input[0])
    return None if dtype in ("float32", "float64", "int32", "int64") else f"TVM doesn't sort {dtype}"


REFUSALS: dict[str, Callable[[onnx.NodeProto, Attributes, Graph], str | None]] = {
    "BatchNormalization": _why_not_batch_norm,
    "Col2Im": lambda node, attrs, graph: None if {*node.input[1:3]} <= graph.constants.keys() else "its shapes aren't constant",
    "CumProd": lambda node, attrs, graph: None if node.input[1] in graph.constants else "its axis isn't constant",
    "DFT": fourier.why_not_dft,
    "Dropout": lambda node, attrs, graph: "training_mode=1",
    "Pow": _why_not_pow,
    "Resize": resize.why_not,
    "OneHot": lambda node, attrs, graph: None if node.input[1] in graph.constants else "its depth isn't constant",
    "RoiAlign": lambda node, attrs, graph: "mode=max" if attrs.get("mode") == b"max" else None,
    "STFT": fourier.why_not_stft,
    "TopK": _why_not_top_k,
    "Upsample": resize.why_not,
}


def why_not(node: onnx.NodeProto, graph: Graph) -> str | None:
    """Why this standard operator would come out wrong, or None."""
    refusal = REFUSALS.get(node.op_type)
    return refusal(node, attributes(node), graph) if refusal else None
