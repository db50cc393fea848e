"""Operators beside the sites: NumPy's values, and the same bits on every machine and for every number of threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax import op

from tests.exec.kernel_runner import HOST, RUNNABLE, assert_same_bits, before_a_guard_page, target_for
from tvmfuse.kernel import generic
from tvmfuse.values import Machine

pytestmark = pytest.mark.usefixtures("small_kernels_are_shared")

nn = op.nn
MACHINES = [HOST, *(Machine(isa, threads=2) for isa in RUNNABLE)]


@dataclass(frozen=True)
class Case:
    """build    the operators.
    reference   the same in NumPy, on float64.
    same_bits   nothing in it is left to LLVM's contraction, which ExactRounding rules out in a whole build.
    """

    name: str
    shapes: Sequence[tuple[int, ...]]
    build: Callable[..., Any]
    reference: Callable[..., np.ndarray]
    same_bits: bool = True
    dtypes: Sequence[str] = field(default=())

    def inputs(self) -> list[np.ndarray]:
        random = np.random.default_rng(5)
        dtypes = self.dtypes or ["float32"] * len(self.shapes)
        return [
            random.standard_normal(shape).astype(dtype) if dtype.startswith("float") else random.integers(0, 3, shape).astype(dtype)
            for shape, dtype in zip(self.shapes, dtypes, strict=True)
        ]


def windows(x: np.ndarray, size: int, stride: int, pad: int, fill: float) -> np.ndarray:
    """NHWC -> (N, OH, OW, C, size, size)"""
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)), constant_values=fill)
    return np.lib.stride_tricks.sliding_window_view(padded, (size, size), (1, 2))[:, ::stride, ::stride]


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def normalised(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


def permuted(shape: tuple[int, ...], axes: tuple[int, ...]) -> Case:
    name = f"transpose {'x'.join(map(str, shape))} to {axes}"
    return Case(name, [shape], lambda x: op.permute_dims(x, list(axes)), lambda x: x.transpose(axes))


def concatenated(shapes: list[tuple[int, ...]], axis: int) -> Case:
    return Case(f"concat {len(shapes)} on {axis}", shapes, lambda *x: op.concat(list(x), axis), lambda *x: np.concatenate(x, axis))


def summed(shape: tuple[int, ...], axes: tuple[int, ...]) -> Case:
    return Case(f"sum {'x'.join(map(str, shape))} over {axes}", [shape], lambda x: op.sum(x, list(axes)), lambda x: x.sum(axes))


def padded(shape: tuple[int, ...], widths: tuple[int, ...]) -> Case:
    pairs = [(widths[2 * i], widths[2 * i + 1]) for i in range(len(shape))]
    return Case(f"pad {'x'.join(map(str, shape))} by {widths}", [shape], lambda x: nn.pad(x, list(widths)), lambda x: np.pad(x, pairs))


def max_pooled(shape: tuple[int, ...], size: int, stride: int, pad: int) -> Case:
    return Case(
        f"max pool {'x'.join(map(str, shape))} {size}s{stride}p{pad}", [shape],
        lambda x: nn.max_pool2d(x, (size, size), (stride, stride), (pad,) * 4, layout="NHWC"),
        lambda x: windows(x, size, stride, pad, -np.inf).max((-2, -1)),
    )  # fmt: skip


def average_pooled(shape: tuple[int, ...], size: int, pad: int, counts_pad: bool) -> Case:
    def reference(x: np.ndarray) -> np.ndarray:
        counted = np.ones_like(x) if not counts_pad else None
        total = windows(x, size, 1, pad, 0).sum((-2, -1))
        return total / (size * size if counted is None else windows(counted, size, 1, pad, 0).sum((-2, -1)))

    return Case(
        f"average pool {'x'.join(map(str, shape))} {size}p{pad} {counts_pad}", [shape],
        lambda x: nn.avg_pool2d(x, (size, size), (1, 1), (pad,) * 4, layout="NHWC", count_include_pad=counts_pad),
        reference,
    )  # fmt: skip


def lrn(x: np.ndarray) -> np.ndarray:
    wide = np.pad(x * x, ((0, 0), (0, 0), (2, 2)))
    return np.lib.stride_tricks.sliding_window_view(wide, 5, 2).sum(-1) / 5


CASES = [
    Case(
        "chain",
        [(3, 5, 33), (33,), (3, 5, 33)],
        lambda x, b, r: nn.relu(op.add(op.add(x, b), r)),
        lambda x, b, r: np.maximum(x + b + r, 0),
    ),  # fmt: skip
    Case("scalar", [()], lambda x: op.add(x, x), lambda x: x + x),
    Case("odd length", [(1009,)], op.abs, np.abs),
    Case("broadcast", [(1, 7)], lambda x: op.broadcast_to(x, (13, 7)), lambda x: np.broadcast_to(x, (13, 7))),
    Case("where", [(5, 19), (5, 19)], lambda x, y: op.where(op.less(x, y), x, y), np.minimum),
    Case("flip", [(4, 19)], lambda x: op.flip(x, 1), lambda x: x[:, ::-1]),
    Case("tile", [(3, 7)], lambda x: op.tile(x, (2, 3)), lambda x: np.tile(x, (2, 3))),
    Case("slice", [(4, 20, 9)], lambda x: op.strided_slice(x, [1], [3], [18], [2]), lambda x: x[:, 3:18:2]),
    Case("slice of the last axis", [(4, 50)], lambda x: op.strided_slice(x, [1], [1], [50], [3]), lambda x: x[:, 1::3]),
    Case("gather", [(3, 40), (5,)], lambda x, i: op.take(x, i, 0), lambda x, i: x[i], dtypes=("float32", "int64")),
    Case("gather in the last axis", [(40, 3), (37,)], lambda x, i: op.take(x, i, 1), lambda x, i: x[:, i], dtypes=("float32", "int64")),
    Case("reflect", [(6, 9)], lambda x: nn.pad(x, [2, 1, 3, 2], "reflect"), lambda x: np.pad(x, ((2, 1), (3, 2)), mode="reflect")),
    Case(
        "nearest resize",
        [(1, 3, 4, 20)],
        lambda x: op.image.resize2d(
            x, (6, 8), None, "NHWC", "nearest_neighbor", coordinate_transformation_mode="asymmetric", rounding_method="floor"
        ),
        lambda x: x.repeat(2, 1).repeat(2, 2),
    ),  # fmt: skip
    permuted((1, 3, 20, 11), (0, 2, 3, 1)),
    permuted((1, 20, 11, 3), (0, 3, 1, 2)),
    permuted((2, 9, 33), (0, 2, 1)),
    permuted((40, 50), (1, 0)),
    permuted((2, 5, 3, 17), (0, 2, 1, 3)),
    permuted((5, 17, 4, 6), (3, 1, 0, 2)),
    Case("transpose and relu", [(20, 35)], lambda x: nn.relu(op.permute_dims(x, [1, 0])), lambda x: np.maximum(x.T, 0)),
    Case("transpose of float64", [(20, 35)], lambda x: op.permute_dims(x, [1, 0]), lambda x: x.T, dtypes=("float64",)),
    Case("transpose of bool", [(20, 35)], lambda x: op.permute_dims(op.less(x, op.abs(x)), [1, 0]), lambda x: (x < np.abs(x)).T),
    Case(
        "channel shuffle",
        [(1, 5, 5, 24)],
        lambda x: op.reshape(op.permute_dims(op.reshape(x, (1, 5, 5, 3, 8)), [0, 1, 2, 4, 3]), (1, 5, 5, 24)),
        lambda x: x.reshape(1, 5, 5, 3, 8).swapaxes(3, 4).reshape(1, 5, 5, 24),
    ),  # fmt: skip
    concatenated([(1, 5, 5, 12), (1, 5, 5, 16), (1, 5, 5, 1), (1, 5, 5, 3)], 3),
    concatenated([(1, 2, 7), (1, 30, 7)], 1),
    padded((1, 5, 6, 20), (0, 0, 1, 1, 2, 0, 0, 0)),
    padded((2, 5, 9), (1, 0, 0, 2, 3, 3)),
    padded((40, 1), (0, 3, 1, 0)),
    summed((7, 50), (1,)),
    summed((7, 50), (0,)),
    summed((4, 9, 21), (0, 2)),
    summed((3, 4, 5, 40), (1, 2)),
    summed((1000,), (0,)),
    summed((1, 1), (0, 1)),
    Case("mean", [(1, 7, 7, 37)], lambda x: op.mean(x, [1, 2], keepdims=True), lambda x: x.mean((1, 2), keepdims=True)),
    Case("min", [(6, 41)], lambda x: op.min(x, 1), lambda x: x.min(1)),
    Case("product", [(6, 41)], lambda x: op.prod(x, 1), lambda x: x.prod(1)),
    Case("argmax of the last axis", [(5, 41)], lambda x: op.argmax(x, 1), lambda x: x.argmax(1)),
    Case("argmax of the first axis", [(5, 41)], lambda x: op.argmax(x, 0), lambda x: x.argmax(0)),
    Case("softmax", [(5, 41)], lambda x: nn.softmax(x, 1), lambda x: softmax(x, 1)),
    Case("softmax of one row", [(1, 1000)], lambda x: nn.softmax(x, 1), lambda x: softmax(x, 1)),
    Case("softmax of the first axis", [(5, 41)], lambda x: nn.softmax(x, 0), lambda x: softmax(x, 0)),
    Case(
        "layer norm",
        [(17, 20), (20,), (20,)],
        lambda x, g, b: nn.layer_norm(x, g, b, [-1]),
        lambda x, g, b: normalised(x, (1,)) * g + b,
        same_bits=False,
    ),  # fmt: skip
    Case(
        "instance norm",
        [(2, 6, 7, 13), (13,), (13,)],
        lambda x, g, b: nn.instance_norm(x, g, b, 3, [1, 2]),
        lambda x, g, b: normalised(x, (1, 2)) * g + b,
        same_bits=False,
    ),  # fmt: skip
    Case(
        "local response",
        [(1, 6, 70)],
        lambda x: op.squeeze(
            nn.avg_pool2d(op.expand_dims(op.multiply(x, x), 3), (1, 5), (1, 1), (0, 2, 0, 2), layout="NHWC", count_include_pad=True), [3]
        ),
        lrn,
    ),  # fmt: skip
    max_pooled((1, 9, 8, 20), 3, 2, 1),
    max_pooled((2, 6, 6, 3), 2, 1, 0),
    average_pooled((1, 6, 7, 20), 3, 1, True),
    average_pooled((1, 6, 7, 33), 3, 1, False),
    Case("float64 matmul", [(9, 20), (20, 21)], op.matmul, np.matmul, same_bits=False, dtypes=("float64", "float64")),
    Case(
        "matmul with the transpose",
        [(9, 20), (7, 20)],
        lambda x, y: op.matmul(x, op.permute_dims(y)),
        lambda x, y: x @ y.T,
        same_bits=False,
    ),  # fmt: skip
]


def fused(case: Case) -> tvm.IRModule:
    bb = relax.BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(x.shape, str(x.dtype))) for i, x in enumerate(case.inputs())]
    with bb.function("main", inputs):
        with bb.dataflow():
            result = bb.emit_output(bb.normalize(case.build(*inputs)))
        bb.emit_func_output(result)
    passes = (relax.transform.LegalizeOps, relax.transform.AnnotateTIROpPattern, relax.transform.FuseOps, relax.transform.FuseTIR)
    return tvm.transform.Sequential([p() for p in passes])(bb.get())


@functools.cache
def compiled(machine: Machine) -> dict[str, Callable[..., np.ndarray]]:
    """Every case on one machine, each as a chain of kernels over arrays that end before a guard page."""
    functions, runs = {}, {}
    for number, case in enumerate(CASES):
        mod = fused(case)
        for var, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc):
                name = f"case{number}_{var.name_hint}"
                functions[name] = generic.scheduled(name, func, machine).with_attr("global_symbol", name)
        runs[case.name] = functools.partial(_run, mod["main"], f"case{number}_")
    module = tvm.compile(tvm.IRModule(functions), target_for(machine.isa))
    return {name: functools.partial(run, module) for name, run in runs.items()}


def _run(main: relax.Function, prefix: str, module: Any, inputs: Sequence[np.ndarray]) -> np.ndarray:
    arrays = {param: before_a_guard_page(x) for param, x in zip(main.params, inputs, strict=True)}
    for binding in main.body.blocks[0].bindings:
        if isinstance(binding.value, relax.Var):
            arrays[binding.var] = arrays[binding.value]
            continue
        func, args = binding.value.args[0], binding.value.args[1]
        out = np.empty([int(extent) for extent in binding.value.ty.shape], str(binding.value.ty.dtype))
        out.view(np.uint8).fill(0xFF) if out.ndim else out.fill(1)  # a NaN, so that a missed element shows
        arrays[binding.var] = before_a_guard_page(out)
        module[prefix + func.name_hint](*(tvm_ffi.from_dlpack(arrays[arg]) for arg in (*args.fields, binding.var)))
    return arrays[main.body.body]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values(case):
    inputs = case.inputs()
    expected = case.reference(*(x.astype(np.float64) if x.dtype.kind == "f" else x for x in inputs))
    result = compiled(HOST)[case.name](inputs)
    assert result.shape == np.shape(expected)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case.same_bits], ids=lambda case: case.name)
def test_bits_depend_on_neither_machine_nor_threads(case):
    inputs = case.inputs()
    assert_same_bits([np.atleast_1d(compiled(machine)[case.name](inputs)) for machine in MACHINES], MACHINES)


@pytest.mark.parametrize("case", [case for case in CASES if not case.same_bits], ids=lambda case: case.name)
@pytest.mark.parametrize("machine", MACHINES[1:], ids=lambda machine: f"{machine.isa.name}-{machine.threads}")
def test_values_on_other_machines(case, machine):
    inputs = case.inputs()
    np.testing.assert_allclose(compiled(machine)[case.name](inputs), compiled(HOST)[case.name](inputs), rtol=1e-5, atol=1e-5)


def test_maximum_of_nothing_but_minus_infinity_is_minus_infinity():
    """TVM starts from the lowest finite number."""
    inputs = [np.full((2, 6, 6, 3), -np.inf, np.float32)]
    assert (compiled(HOST)["max pool 2x6x6x3 2s1p0"](inputs) == -np.inf).all()
