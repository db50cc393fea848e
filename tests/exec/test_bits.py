"""Every anchor family with every epilogue operation: one result, whatever the placement, the threads and the instruction set.

The inputs hold NaN, infinities, negative zeros, denormals and huge numbers; no extent is a multiple of a vector. Each module's LLVM IR
is searched for products that LLVM could contract with a sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import onnx.parser
import pytest

from tests.exec.kernel_runner import HOST, RUNNABLE, Compiled, count_differing, target_for, with_knobs
from tests.exec.llvm_scan import contractible
from tvmfuse import kernel
from tvmfuse.building import compile_model, plan_for, prepare
from tvmfuse.measure.host import host_target
from tvmfuse.values import (
    VOCABULARY,
    Anchor,
    Candidate,
    Conv2d,
    Conv2dTranspose,
    Elementwise,
    Epilogue,
    Machine,
    Matmul,
    Operand,
    PlanarConv2d,
    Recurrent,
    Step,
    Workload,
)

pytestmark = pytest.mark.usefixtures("small_kernels_are_shared")

ANCHORS: dict[str, Anchor] = {
    "matmul": Matmul(1, 5, 19, 3),
    "conv2d": Conv2d(1, 2, 3, 2, 19, 2, 2, padding=(1, 0, 0, 1)),
    "depthwise": Conv2d(1, 2, 3, 19, 19, 2, 2, padding=(1, 1, 0, 0), groups=19),
    "conv2d_transpose": Conv2dTranspose(1, 2, 2, 2, 19, 2, 2, (2, 1), (0, 1, 0, 0)),
    "elementwise": Elementwise((3, 5, 19)),
}
# They share the code that applies an epilogue with those above: a few operations show that it gets the right values. So they do for the
# machines beside the host, and for two threads; what each operation computes on each machine is the elementwise family's part.
VARIANTS: dict[str, Anchor] = {
    "batched matmul of a computed B": Matmul(2, 3, 19, 4, "mbk", "bnk", "mbn", constant_b=False),
    "grouped and dilated conv2d": Conv2d(1, 3, 5, 6, 38, 2, 2, (2, 1), (0, 1, 1, 0), (1, 2), 2),
    "conv2d over planes": PlanarConv2d(1, 3, 19, 4, 6, 2, 2, padding=(1, 0, 0, 1), groups=2),
    "depthwise conv2d_transpose": Conv2dTranspose(1, 1, 3, 19, 19, 1, 3, (1, 2), (0, 1, 0, 1), groups=19),
}
SOME = ("div", "max", "tanh", "where", "cast")
EDGES = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-41, -1e-45, 3e38, -3e38)
FINITE_EDGES = (-0.0, 0.0, 1e-41, -1e-45, 3e30)
# The machines that code is compiled for; the last is the CPU at hand with all its features.
MACHINES = [*((isa.name, Machine(isa), target_for(isa)) for isa in RUNNABLE), ("host", HOST, host_target())]


def epilogues(shape: tuple[int, ...]) -> Iterator[tuple[str, Epilogue]]:
    """Every operation on the anchor's result and an operand of the full shape, then a product and a sum that must not contract."""
    last = len(shape) - 1
    whole, channel = Operand(shape, tuple(range(last + 1))), Operand((shape[-1],), (last,))
    for op, (arity, names) in VOCABULARY.items():
        params = {"low": -0.5, "high": 2.5, "alpha": 0.1}
        args = {1: ("%0",), 2: ("%0", "$0"), 3: ("%1", "%0", "$0")}[arity]
        first = [Step("less", ("%0", "$0"), dtype="bool")] if op == "where" else []
        if op in ("less", "greater", "equal", "isnan"):
            steps = [Step(op, args, dtype="bool"), Step("where", ("%1", "%0", "$0"))]
        else:
            steps = [*first, Step(op, args, tuple(params[name] for name in names), dtype="float16" if op == "cast" else "float32")]
        dtype = steps[-1].dtype
        at = len(steps)
        steps += [Step("mul", (f"%{at}", "$1"), dtype=dtype), Step("add", (f"%{at + 1}", "$0"), dtype=dtype)]
        yield op, Epilogue(tuple(steps), (whole, channel))


def smallest_tile(workload: Workload, machine: Machine) -> Candidate:
    """The default's placement on the fewest registers: several tiles, whole ones and partial ones, and little code."""
    default, *others = kernel.candidates(workload, machine)

    def size(candidate: Candidate) -> int:
        return math.prod(value for name, value in candidate.knobs if isinstance(value, int) and name not in ("threads", "ku"))

    return min([default, *(c for c in others if (c.placement, c.cut) == (default.placement, default.cut))], key=size)


def candidates(workload: Workload, machine: Machine, everywhere: bool) -> list[Candidate]:
    """In registers; everywhere: on a tile and apart too."""
    whole = with_knobs(smallest_tile(workload, machine), threads=machine.threads)
    if not everywhere or not whole.cut or workload.family == "elementwise":
        return [whole]
    return [whole, dataclasses.replace(whole, placement="tile"), dataclasses.replace(whole, placement="separate", cut=0)]


def edged(random: np.random.Generator, shape: tuple[int, ...], dtype: str, edges: tuple[float, ...], one_in: int) -> np.ndarray:
    array = random.standard_normal(shape)
    return np.where(random.integers(0, one_in, shape) == 0, random.choice(edges, shape), array).astype(dtype)


def inputs_of(workload: Workload) -> list[np.ndarray]:
    """So many edges among the activations that about a third of the sums are special; weights are finite."""
    random = np.random.default_rng(3)
    anchor = workload.anchor
    terms = max(1, anchor.flop() // 2 // math.prod(anchor.output_shape()))
    first, *weights = anchor.input_shapes()
    arrays = [edged(random, first, anchor.dtype, EDGES, 3 * min(terms, 16))]
    arrays += [edged(random, shape, anchor.dtype, FINITE_EDGES, 9) for shape in weights]
    return arrays + [edged(random, operand.shape, operand.dtype, EDGES, 8) for operand in workload.epilogue.operands]


def assert_one_result(workloads: dict[str, Workload]) -> None:
    inputs = {op: inputs_of(workload) for op, workload in workloads.items()}
    references: dict[str, list[np.ndarray]] = {}
    for name, machine, target in MACHINES:
        home, built = name == "host", []
        for op, workload in workloads.items():
            representative = op in SOME or workload.family == "recurrent"
            if home or representative or workload.family == "elementwise":
                for threads in (1, 2) if home and representative else (1,):
                    shared = dataclasses.replace(machine, threads=threads)
                    built += [(op, c, kernel.build_kernel(workload, c, shared)) for c in candidates(workload, shared, home)]
        module = Compiled([k for _, _, k in built], target)
        assert not contractible(module.llvm_ir())
        for number, (op, candidate, _) in enumerate(built):
            results = module.run(number, inputs[op])
            for got, wanted in zip(results, references.setdefault(op, results), strict=True):
                differ = count_differing(got, wanted)
                assert not differ, f"{op} {candidate} on {name}: {differ} of {got.size} elements differ"
    for op, results in references.items():
        finite = np.isfinite(results[0].astype(np.float64)).mean()
        assert 0.2 < finite < 1, f"{op}: {finite:.0%} of the results are finite, so that the comparison says little"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("family", [*ANCHORS, *VARIANTS])
def test_one_result_in_every_placement_with_every_operation_on_every_machine(family: str) -> None:
    anchor = (ANCHORS | VARIANTS)[family]
    ops = VOCABULARY if family in ANCHORS else SOME
    assert_one_result({op: Workload(anchor, epilogue) for op, epilogue in epilogues(anchor.output_shape()) if op in ops})


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_recurrent_kernels_have_one_result_on_every_machine(kind: str) -> None:
    assert_one_result({kind: Workload(Recurrent(kind, 3, 5, 19))})


# What no anchor's kernel computes: normalisations, pools, a resize, a softmax, products in float64 and of a tensor with itself.
GENERIC = """<ir_version: 8, opset_import: ["" : 17]>
g (float[1,6,9,11] x, float[5,19] z, float[19] scale, double[5,7] d, double[7,9] e)
  => (float[1,6,9,11] norm, float[1,6,9,11] lrn, float[1,6,9,11] mean, float[1,6,18,22] large, float[5,19] soft, float[5,19] layer,
      double[5,9] wide, float[5,5] square)
<float[6] w = {1.5, 2, -1, 3, 0.5, 4}, float[6] b = {0.1, 0.2, 0.3, -0.4, 0.5, 0.6}, float[4] twice = {1, 1, 2, 2}> {
  norm = InstanceNormalization(x, w, b)
  lrn = LRN<size = 3>(x)
  mean = AveragePool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x)
  large = Resize<mode = "linear", coordinate_transformation_mode = "asymmetric">(x, , twice)
  soft = Softmax<axis = 1>(z)
  layer = LayerNormalization<axis = 1>(z, scale)
  wide = MatMul(d, e)
  turned = Transpose(z)
  square = MatMul(z, turned)
}"""


@pytest.mark.parametrize("target", [None, {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"}], ids=["host", "aarch64"])
def test_a_whole_build_leaves_no_product_to_be_contracted(target: dict[str, str] | None) -> None:
    plan = plan_for(target, 2, "always", None)
    session = compile_model(prepare(onnx.parser.parse_model(GENERIC)), plan, plan.chooser)
    sources = [module.inspect_source("ll") for module in session.program.module.imports]
    assert sum(source.count("define") for source in sources) > 10
    assert not any(map(contractible, sources))
