"""Kernels compiled, fed and compared: what the tests of all anchor families share.

Every array that a kernel sees ends right before an inaccessible page and starts at whatever address that leaves, so that an
access behind an end, or one that assumes alignment, ends the process. Outputs start as NaN, so that a missed element shows.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
import tvm
import tvm_ffi

from tvmfuse import kernel
from tvmfuse.kernel.family import Kernel
from tvmfuse.values import AVX2, AVX512, ISA, NEON, Anchor, Candidate, Epilogue, Machine, Operand, Step, Workload

_HOST_FEATURES = {str(name) for name, has in tvm.get_global_func("tvm.codegen.llvm.GetHostCPUFeatures")().items() if has}
# What LLVM compiles for, and what the CPU must have to run it. Vectors of 16 bytes are everywhere.
_COMPILED_FOR = {AVX512: "skylake-avx512", AVX2: "haswell", NEON: None}
_NEEDS = {AVX512: {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}, AVX2: {"avx2", "fma", "bmi2"}, NEON: set()}
RUNNABLE = [isa for isa in (AVX512, AVX2, NEON) if _NEEDS[isa] <= _HOST_FEATURES]
HOST = Machine(RUNNABLE[0])

each_isa = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(
            isa,
            id=isa.name,
            marks=pytest.mark.skipif(isa not in RUNNABLE, reason=f"this CPU lacks {', '.join(_NEEDS[isa] - _HOST_FEATURES)}"),
        )
        for isa in (AVX512, AVX2, NEON)
    ],
)
# Two values live at the cut 2: x * sigmoid(x).
SILU = Epilogue((Step("relu", ("%0",)), Step("sigmoid", ("%1",)), Step("mul", ("%1", "%2"))))


def chained(anchor: Anchor) -> Workload:
    """The anchor times a tensor of its output's shape, plus a bias, and relu: an unfenced product would contract with the sum."""
    shape, dtype = anchor.output_shape(), anchor.dtype
    steps = (Step("mul", ("%0", "$0"), dtype=dtype), Step("add", ("%1", "$1"), dtype=dtype), Step("relu", ("%2",), dtype=dtype))
    last = len(shape) - 1
    return Workload(anchor, Epilogue(steps, (Operand(shape, tuple(range(last + 1)), dtype), Operand((shape[-1],), (last,), dtype))))


def after_chain(sums: np.ndarray, factor: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """The epilogue of `chained` in the precision of its arguments."""
    return np.maximum(sums * factor + bias, 0)


def inputs_of(workload: Workload) -> list[np.ndarray]:
    """The anchor's inputs in their canonical shapes, then the operands; about as many negative as positive."""
    random = np.random.default_rng(7)
    shapes = [*workload.anchor.input_shapes(), *(o.shape for o in workload.epilogue.operands)]
    return [random.standard_normal(shape).astype(workload.anchor.dtype) for shape in shapes]


def run(workload: Workload, candidates: Iterable[Candidate], machine: Machine, inputs: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Each candidate's results. All are compiled in one module."""
    kernels = [kernel.build_kernel(workload, candidate, machine) for candidate in candidates]
    compiled = Compiled(kernels, target_for(machine.isa))
    return [compiled.run(i, inputs) for i in range(len(kernels))]


def run_default(workload: Workload, machine: Machine, inputs: Sequence[np.ndarray]) -> np.ndarray:
    ((result, *_),) = run(workload, kernel.candidates(workload, machine)[:1], machine, inputs)
    return result


def target_for(isa: ISA) -> tvm.target.Target:
    if _COMPILED_FOR[isa] is None:
        return tvm.target.Target.from_device(tvm.cpu())
    return tvm.target.Target({"kind": "llvm", "mcpu": _COMPILED_FOR[isa]})


class Compiled:
    """Kernels in one module. Launches of equal functions, such as the anchor before different passes, are compiled once."""

    def __init__(self, kernels: Sequence[Kernel], target: tvm.target.Target) -> None:
        self._kernels = kernels
        named: dict[int, str] = {}
        functions: dict[str, tvm.tirx.PrimFunc] = {}
        self._names: list[list[str]] = []
        for built in kernels:
            self._names.append([])
            for launch in built.launches:
                name = named.setdefault(tvm_ffi.structural_hash(launch.func), f"kernel{len(named)}")
                functions.setdefault(name, launch.func.with_attr("global_symbol", name))
                self._names[-1].append(name)
        self._module = tvm.compile(tvm.IRModule(functions), target)

    def llvm_ir(self) -> str:
        return self._module.mod.inspect_source("ll")

    def run(self, number: int, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The results of the kernel that was given as `number`."""
        built = self._kernels[number]
        given = [built.packers[i](array) if i in built.packers else array for i, array in enumerate(inputs)]
        assert [array.shape for array in given] == [buffer.shape for buffer in built.buffers[: built.inputs]]
        blank = [np.full(buffer.shape, np.nan, buffer.dtype) for buffer in built.buffers[built.inputs :]]
        arrays = [before_a_guard_page(array) for array in (*given, *blank)]
        tensors = [tvm_ffi.from_dlpack(array) for array in arrays]
        for name, launch in zip(self._names[number], built.launches, strict=True):
            self._module[name](*(tensors[i] for i in launch.args))
        for now, before in zip(arrays, given, strict=False):
            assert (_bits(now) == _bits(np.ascontiguousarray(before))).all(), "a kernel wrote to its input"
        return [arrays[i].copy() for i in built.results]


def before_a_guard_page(array: np.ndarray) -> np.ndarray:
    page = mmap.PAGESIZE
    whole = -(-array.nbytes // page) * page
    memory = mmap.mmap(-1, whole + page)
    guard = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + whole
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copied = np.frombuffer(memory, array.dtype, array.size, whole - array.nbytes).reshape(array.shape)
    copied[...] = array
    return copied


def assert_same_bits(results: Sequence[np.ndarray], labels: Sequence[object]) -> None:
    """Signs of zeros count; every result is compared with the first."""
    for result, label in zip(results, labels, strict=True):
        differing = np.count_nonzero(_bits(result) != _bits(results[0]))
        assert not differing, f"{label} differs from {labels[0]} in {differing} of {result.size} elements"


def count_differing(got: np.ndarray, wanted: np.ndarray) -> int:
    """Elements of other bits; any NaN equals any other."""
    return int((~((_bits(got) == _bits(wanted)) | (np.isnan(got) & np.isnan(wanted)))).sum())


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"uint{8 * array.itemsize}")


def assert_within_rounding(result: np.ndarray, reference: Callable[..., np.ndarray], inputs: Sequence[np.ndarray], roundings: int) -> None:
    """|result - reference(inputs)| <= gamma(roundings) * reference(|inputs|): Higham, Accuracy and Stability, section 3.1.

    reference  sums and products only, or a function after them that moves no two values apart. In float64, whose own error
               counts as well when the result is float64.
    """
    wide = [array.astype(np.float64) for array in inputs]
    unit = np.finfo(result.dtype).eps / 2 * (2 if result.dtype == np.float64 else 1)
    bound = roundings * unit / (1 - roundings * unit) * reference(*(np.abs(array) for array in wide))
    error = np.abs(result - reference(*wide))
    assert (error <= bound).all(), f"error {error.max():.3g}, up to {(error / np.maximum(bound, 1e-300)).max():.3g} times the bound"


def with_knobs(candidate: Candidate, **knobs: int | str) -> Candidate:
    return dataclasses.replace(candidate, knobs=tuple(sorted({**dict(candidate.knobs), **knobs}.items())))


def each_placement(workload: Workload, machine: Machine) -> list[Candidate]:
    """Every placement and cut on the default's tile, the default first."""
    default, *others = kernel.candidates(workload, machine)
    return [default, *(candidate for candidate in others if candidate.knobs == default.knobs)]


def some_tiles(workload: Workload, machine: Machine, count: int) -> list[Candidate]:
    """The default's placement on `count` tiles, spread evenly over the ranking from the best to the worst."""
    default, *others = kernel.candidates(workload, machine)
    found = [default, *(c for c in others if (c.placement, c.cut) == (default.placement, default.cut))]
    return [found[i * (len(found) - 1) // (count - 1)] for i in range(count)]


def roundings_of_chain(reduction: int) -> int:
    """An fma for each step of the reduction, then the product and the sum of `chained`."""
    return reduction + 2
