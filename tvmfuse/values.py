"""Frozen values that every layer shares. Nothing here imports TVM.

A `Workload` describes one site completely: its anchor and the epilogue's expression. Kernels are built from a
workload alone, so that tuning needs no model, and a record's text can be read by a person.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Placement = Literal["register", "tile", "separate"]
PLACEMENTS: tuple[Placement, ...] = ("register", "tile", "separate")
Source = Literal["measured", "predicted", "default", "forced"]
Numerics = Literal["exact", "relaxed"]
NUMERICS: tuple[Numerics, ...] = ("exact", "relaxed")
# Algorithms whose bits are not the direct computation's: name -> m of F(m x m, 3 x 3). Their candidates are of the relaxed class.
WINOGRAD = {"winograd4": 4, "winograd2": 2}
ALIGNMENT = 64  # bytes, of each weight and each intermediate
ITEM_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "int8": 1, "uint8": 1, "bool": 1}

# The epilogue's closed vocabulary: op -> (number of value arguments, names of its numeric parameters).
VOCABULARY: dict[str, tuple[int, tuple[str, ...]]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "min", "max", "pow", "prelu", "less", "greater", "equal"), (2, ())),
    **dict.fromkeys(("relu", "sigmoid", "tanh", "erf", "exp", "log", "sqrt", "abs", "neg", "softplus", "floor", "isnan", "cast"), (1, ())),
    "where": (3, ()),
    "clip": (1, ("low", "high")),
    "leaky_relu": (1, ("alpha",)),
}


@dataclass(frozen=True)
class Operand:
    """A further input of an epilogue, read at each output element.

    shape     as it is stored.
    axes      for each stored axis the output axis that it follows, or None where it is broadcast (extent 1).
    constant  its value is known when the model is compiled.
    """

    shape: tuple[int, ...]
    axes: tuple[int | None, ...]
    dtype: str = "float32"
    constant: bool = False

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"operand has {len(self.shape)} axes but names {len(self.axes)}")
        if any(axis is None and extent != 1 for extent, axis in zip(self.shape, self.axes, strict=True)):
            raise ValueError(f"operand {self.shape} leaves an axis unmapped whose extent is not 1: {self.axes}")


@dataclass(frozen=True)
class Step:
    """One op of an epilogue, rounded once to `dtype`.

    args  "%0" is the anchor's result, "%i" the result of step i (counted from 1), "$j" operand j; a number is a literal.
    """

    op: str
    args: tuple[str | float, ...]
    params: tuple[float, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.op not in VOCABULARY:
            raise ValueError(f"{self.op!r} is not an epilogue op")
        arity, names = VOCABULARY[self.op]
        if (len(self.args), len(self.params)) != (arity, len(names)):
            raise ValueError(f"{self.op} takes {arity} arguments and parameters {names}")

    def __str__(self) -> str:
        inside = [str(a) for a in self.args] + [f"{p:g}" for p in self.params]
        return f"{self.op}({', '.join(inside)})" + ("" if self.dtype == "float32" else f":{self.dtype}")


@dataclass(frozen=True)
class Epilogue:
    """A straight-line program over the anchor's result; its last step is the site's output."""

    steps: tuple[Step, ...] = ()
    operands: tuple[Operand, ...] = ()

    def legal_cuts(self) -> tuple[int, ...]:
        """Every c for which steps[:c] can run in the loop and steps[c:] apart: only value c may be live across the cut."""
        return tuple(
            cut
            for cut in range(len(self.steps) + 1)
            if all(int(arg[1:]) >= cut for step in self.steps[cut:] for arg in step.args if isinstance(arg, str) and arg.startswith("%"))
        )

    def split(self, cut: int) -> tuple[Epilogue, Epilogue]:
        """The program before and after `cut`, each with only the operands that it reads."""
        if cut not in self.legal_cuts():
            raise ValueError(f"cut {cut} leaves more than one value live; legal: {self.legal_cuts()}")
        return self._part(self.steps[:cut], 0), self._part(self.steps[cut:], cut)

    def operand_order(self, cut: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Which of this program's operands each part of `split` reads, in the part's own order."""
        return self._read(self.steps[:cut]), self._read(self.steps[cut:])

    @staticmethod
    def _read(steps: tuple[Step, ...]) -> tuple[int, ...]:
        names = [int(a[1:]) for s in steps for a in s.args if isinstance(a, str) and a.startswith("$")]
        return tuple(dict.fromkeys(names))

    def _part(self, steps: tuple[Step, ...], first: int) -> Epilogue:
        order = self._read(steps)

        def renamed(arg: str | float) -> str | float:
            if not isinstance(arg, str):
                return arg
            index = int(arg[1:])
            return f"%{index - first}" if arg.startswith("%") else f"${order.index(index)}"

        moved = tuple(dataclasses.replace(s, args=tuple(renamed(a) for a in s.args)) for s in steps)
        return Epilogue(moved, tuple(self.operands[i] for i in order))

    def __str__(self) -> str:
        return " ".join(str(s) for s in self.steps)


@dataclass(frozen=True)
class Matmul:
    """C[b,m,n] = sum over k of A[b,m,k] * B[b,k,n].

    a, c  stored axis order of A and C, slowest first, such as "bmk" or "mbk"; n comes last in c.
    b     stored axis order of B; a B without "b" is shared by all batches and then batch is 1.
    """

    batch: int
    m: int
    n: int
    k: int
    a: str = "bmk"
    b: str = "bkn"
    c: str = "bmn"
    constant_b: bool = True
    dtype: str = "float32"
    family = "matmul"

    def extent(self, axis: str) -> int:
        return {"b": self.batch, "m": self.m, "n": self.n, "k": self.k}[axis]

    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self.extent(x) for x in self.a), tuple(self.extent(x) for x in self.b)

    def output_shape(self) -> tuple[int, ...]:
        return tuple(self.extent(x) for x in self.c)

    def flop(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    def __str__(self) -> str:
        batch = f"{self.batch}x" if self.batch > 1 else ""
        return f"matmul {batch}{self.m}x{self.n}x{self.k} {self.a},{self.b}->{self.c}"


@dataclass(frozen=True)
class Conv2d:
    """Convolution in NHWC with weights (co, kh, kw, ci / groups). padding is (top, left, bottom, right)."""

    n: int
    h: int
    w: int
    ci: int
    co: int
    kh: int
    kw: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    dtype: str = "float32"

    @property
    def family(self) -> str:
        return "depthwise" if self.groups == self.ci and self.groups > 1 and self.co == self.ci else "conv2d"

    @property
    def oh(self) -> int:
        return (self.h + self.padding[0] + self.padding[2] - self.dilation[0] * (self.kh - 1) - 1) // self.stride[0] + 1

    @property
    def ow(self) -> int:
        return (self.w + self.padding[1] + self.padding[3] - self.dilation[1] * (self.kw - 1) - 1) // self.stride[1] + 1

    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.n, self.h, self.w, self.ci), (self.co, self.kh, self.kw, self.ci // self.groups)

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.oh, self.ow, self.co)

    def flop(self) -> int:
        return 2 * self.n * self.oh * self.ow * self.co * self.kh * self.kw * (self.ci // self.groups)

    def winograd_products(self, m: int) -> int:
        """Pairs of a tile and one of its (m + 2)^2 points under F(m x m, 3 x 3); each takes ci * co multiply-adds."""
        return self.n * -(-self.oh // m) * -(-self.ow // m) * (m + 2) ** 2

    def __str__(self) -> str:
        extras = "".join(
            f" {label}{value}"
            for label, value, plain in (
                ("s", self.stride, (1, 1)),
                ("p", self.padding, (0, 0, 0, 0)),
                ("d", self.dilation, (1, 1)),
                ("g", self.groups, 1),
            )
            if value != plain
        )
        return f"{self.family} {self.n}x{self.h}x{self.w}x{self.ci}->{self.co} k{self.kh}x{self.kw}{extras}".replace(", ", ",")


@dataclass(frozen=True)
class PlanarConv2d(Conv2d):
    """The same convolution over images in NCHW, with a stride of 1 along rows. Weights as for NHWC: (co, kh, kw, ci / groups)."""

    family = "planar_conv2d"

    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.n, self.ci, self.h, self.w), (self.co, self.kh, self.kw, self.ci // self.groups)

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.co, self.oh, self.ow)


@dataclass(frozen=True)
class Conv2dTranspose:
    """Transposed convolution in NHWC with weights (ci, kh, kw, co / groups). padding is (top, left, bottom, right)."""

    n: int
    h: int
    w: int
    ci: int
    co: int
    kh: int
    kw: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    output_padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    dtype: str = "float32"
    family = "conv2d_transpose"

    @property
    def oh(self) -> int:
        return (
            (self.h - 1) * self.stride[0]
            - self.padding[0]
            - self.padding[2]
            + self.dilation[0] * (self.kh - 1)
            + 1
            + self.output_padding[0]
        )

    @property
    def ow(self) -> int:
        return (
            (self.w - 1) * self.stride[1]
            - self.padding[1]
            - self.padding[3]
            + self.dilation[1] * (self.kw - 1)
            + 1
            + self.output_padding[1]
        )

    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.n, self.h, self.w, self.ci), (self.ci, self.kh, self.kw, self.co // self.groups)

    def output_shape(self) -> tuple[int, ...]:
        return (self.n, self.oh, self.ow, self.co)

    def flop(self) -> int:
        return 2 * self.n * self.h * self.w * self.ci * self.kh * self.kw * (self.co // self.groups)

    def __str__(self) -> str:
        return (
            f"conv2d_transpose {self.n}x{self.h}x{self.w}x{self.ci}->{self.co} k{self.kh}x{self.kw} s{self.stride} p{self.padding}"
            f" o{self.output_padding} d{self.dilation} g{self.groups}"
        ).replace(", ", ",")


@dataclass(frozen=True)
class Recurrent:
    """One direction of a GRU or LSTM over precomputed input projections.

    Inputs   projections (steps, batch, gates * hidden) with the input bias already added, recurrent weights
             (gates * hidden, hidden), recurrent bias (gates * hidden,), initial hidden state (batch, hidden) and, for an
             LSTM, initial cell state (batch, hidden). Gates in ONNX's order: z, r, h for GRU; i, o, f, c for LSTM.
    Outputs  every step's hidden state (steps, batch, hidden), last hidden state and, for an LSTM, last cell state.
    """

    kind: Literal["gru", "lstm"]
    steps: int
    batch: int
    hidden: int
    reverse: bool = False
    linear_before_reset: bool = True
    dtype: str = "float32"
    family = "recurrent"

    @property
    def gates(self) -> int:
        return 3 if self.kind == "gru" else 4

    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        rows, state = self.gates * self.hidden, (self.batch, self.hidden)
        shapes = ((self.steps, self.batch, rows), (rows, self.hidden), (rows,), state)
        return shapes if self.kind == "gru" else (*shapes, state)

    def output_shape(self) -> tuple[int, ...]:
        return (self.steps, self.batch, self.hidden)

    def flop(self) -> int:
        return 2 * self.steps * self.batch * self.gates * self.hidden * self.hidden

    def __str__(self) -> str:
        flags = " reverse" * self.reverse + " linear_before_reset" * (self.kind == "gru" and self.linear_before_reset)
        return f"{self.kind} {self.steps}x{self.batch}x{self.hidden}{flags}"


@dataclass(frozen=True)
class Elementwise:
    """No reduction at all: the epilogue applied to a stored tensor, also the second pass of a separate placement."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    family = "elementwise"

    def input_shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.shape,)

    def output_shape(self) -> tuple[int, ...]:
        return self.shape

    def flop(self) -> int:
        return 0

    def __str__(self) -> str:
        return f"elementwise {'x'.join(map(str, self.shape))}"


Anchor = Matmul | Conv2d | Conv2dTranspose | Recurrent | Elementwise
ANCHORS: dict[str, type] = {cls.__name__: cls for cls in (Matmul, Conv2d, PlanarConv2d, Conv2dTranspose, Recurrent, Elementwise)}


@dataclass(frozen=True)
class Workload:
    """One site: what is computed, without saying how."""

    anchor: Anchor
    epilogue: Epilogue = Epilogue()

    @property
    def family(self) -> str:
        return self.anchor.family

    @property
    def output_dtype(self) -> str:
        return self.epilogue.steps[-1].dtype if self.epilogue.steps else self.anchor.dtype

    def bytes_moved(self) -> int:
        """Inputs, operands and output, each read or written once."""
        anchor = self.anchor
        sizes = [(shape, anchor.dtype) for shape in anchor.input_shapes()] + [(o.shape, o.dtype) for o in self.epilogue.operands]
        return sum(math.prod(shape) * ITEM_BYTES.get(dtype, 4) for shape, dtype in (*sizes, (anchor.output_shape(), self.output_dtype)))

    def to_json(self) -> dict[str, Any]:
        return {
            "anchor": {"type": type(self.anchor).__name__, **dataclasses.asdict(self.anchor)},
            "epilogue": dataclasses.asdict(self.epilogue),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Workload:
        """Raises KeyError, TypeError or ValueError when `data` is not a workload."""
        fields = {k: _frozen(v) for k, v in data["anchor"].items() if k != "type"}
        steps = tuple(Step(**{k: _frozen(v) for k, v in s.items()}) for s in data["epilogue"]["steps"])
        operands = tuple(Operand(**{k: _frozen(v) for k, v in o.items()}) for o in data["epilogue"]["operands"])
        return Workload(ANCHORS[data["anchor"]["type"]](**fields), Epilogue(steps, operands))

    def hash(self) -> str:
        """Of the structure, so that equal sites of any model share their records."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.anchor}" + (f" | {self.epilogue}" if self.epilogue.steps else "")


def _frozen(value: Any) -> Any:
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Candidate:
    """How a workload is computed: a small value that is replayed, never a blob.

    cut    how many of the epilogue's steps run at the placement; the rest is a separate pass. 0 for "separate".
    knobs  the family's own parameters, such as (("mr", 6), ("nr", 64)); sizes in elements.
    """

    placement: Placement
    cut: int
    knobs: tuple[tuple[str, int | str], ...] = ()

    @property
    def algorithm(self) -> str | None:
        """One of WINOGRAD; None for the direct computation."""
        return dict(self.knobs).get("algorithm")  # type: ignore[return-value]

    @property
    def numerics(self) -> Numerics:
        """Candidates of one workload and algorithm give equal bits; "exact" are those of the direct computation."""
        return "relaxed" if self.algorithm else "exact"

    def __getitem__(self, knob: str) -> Any:
        return dict(self.knobs)[knob]

    def to_json(self) -> dict[str, Any]:
        return {"placement": self.placement, "cut": self.cut, "knobs": dict(self.knobs)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Candidate:
        return Candidate(data["placement"], int(data["cut"]), tuple(sorted(data["knobs"].items())))

    def __str__(self) -> str:
        return f"{self.placement}@{self.cut} " + " ".join(f"{k}={v}" for k, v in self.knobs)


@dataclass(frozen=True)
class ISA:
    """What a schedule has to know of an instruction set. vector_bytes and registers describe the widest vector file."""

    name: str
    vector_bytes: int
    registers: int

    def lanes(self, dtype: str = "float32") -> int:
        return self.vector_bytes // ITEM_BYTES.get(dtype, 4)


AVX512 = ISA("avx512", 64, 32)
AVX2 = ISA("avx2", 32, 16)
NEON = ISA("neon", 16, 32)


@dataclass(frozen=True)
class Machine:
    """The part of a target that schedules depend on: instruction set, cache sizes in bytes, threads to use.

    pool  threads that TVM has there, where that is known; those that aren't used take part in a region's meetings all the same.
    """

    isa: ISA
    l1: int = 32 << 10
    l2: int = 512 << 10
    l3: int = 8 << 20
    threads: int = 1
    pool: int = 0


@dataclass(frozen=True)
class Level:
    """One level of memory: how many bytes it holds, and how many a second are read from it."""

    name: str
    holds: float
    bytes_per_s: float


@dataclass(frozen=True)
class Cost:
    """What one run of a kernel has to do at least. Bytes: each tensor read or written once.

    passes  how often the constants are read in a run: once for each step of a recurrent network, whose steps wait for each other.
    """

    flop: int = 0
    activation_bytes: int = 0
    constant_bytes: int = 0
    passes: int = 1


@dataclass(frozen=True)
class Roofline:
    """What `threads` threads of a machine can do at most; levels of memory from the nearest to the farthest."""

    flop_per_s: float
    levels: tuple[Level, ...]
    threads: int = 1

    def level(self, working_set: int) -> Level:
        """The nearest that holds so many bytes."""
        return next((level for level in self.levels if working_set <= level.holds), self.levels[-1])

    def bound_s(self, cost: Cost, model_bytes: int) -> float:
        """Seconds below which a kernel can't run inside a model that touches `model_bytes` in all.

        Activations come from where their producer has left them; constants from where a whole run of the model leaves them.
        """
        activations = cost.activation_bytes / self.level(cost.activation_bytes).bytes_per_s
        constants = cost.constant_bytes / self.level(max(model_bytes, cost.constant_bytes)).bytes_per_s
        constants += (cost.passes - 1) * cost.constant_bytes / self.level(cost.constant_bytes).bytes_per_s
        return max(cost.flop / self.flop_per_s, activations + constants)


@dataclass(frozen=True)
class Host:
    """Identity of a CPU, as read on it. Records hold for one host."""

    vendor: str
    family: int
    model: int
    stepping: int
    features: tuple[str, ...]
    l1: int
    l2: int
    l3: int
    name: str = ""

    @functools.cached_property
    def key(self) -> str:
        digest = hashlib.sha256(" ".join(self.features).encode()).hexdigest()[:8]
        return f"{self.vendor}-{self.family:x}-{self.model:x}-{self.stepping:x}-{digest}".lower().replace(" ", "")

    @property
    def caches(self) -> str:
        return ", ".join(f"{name} {size >> 10} KiB" for name, size in (("L1", self.l1), ("L2", self.l2), ("L3", self.l3)))


@dataclass(frozen=True)
class Measurement:
    """One candidate's times in seconds, in the order they were taken; `error` is set when it failed instead.

    default_s  the default's, each taken next to the one in the same place of `times_s`; empty when there is none beside them.
    relative_error  of a relaxed candidate on the device's seeded data: largest |difference| to float64 over the largest |result|.
    """

    candidate: Candidate
    times_s: tuple[float, ...] = ()
    error: str | None = None
    default_s: tuple[float, ...] = ()
    relative_error: float | None = None


Outcome = Literal["wins", "keeps default", "undecided", "too noisy", "failed"]


@dataclass(frozen=True)
class Verdict:
    """What the decision rule says of one candidate against the default.

    ratio     median of time_candidate / time_default; ci its confidence interval; aa_noise |median ln ratio| of the control.
    """

    outcome: Outcome
    candidate: Candidate
    ratio: float
    ci: tuple[float, float]
    aa_noise: float
    pairs: int
    why: str


@dataclass(frozen=True)
class TensorInfo:
    """One input or output as the model calls it."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class View:
    """A tensor that a compiled model is given behind its inputs and outputs.

    It lies in weight number `weight`, or at a byte offset of the workspace if that is None.
    """

    weight: int | None
    offset: int
    shape: tuple[int, ...]
    dtype: str


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Site:
    """What a person is told of one site. `placement` is None when nothing of the epilogue could be fused.

    algorithm       of the relaxed class, else None; relative_error: what was measured of it, None before that.
    why_not_relaxed the reason for which a convolution has exact candidates only; None where nothing else was asked for.
    """

    name: str
    anchor: str
    epilogue: tuple[str, ...]
    crossed: tuple[str, ...]
    placement: Placement | None
    cut: int
    source: Source
    reason: str | None
    workload: Workload
    ratio: float | None = None
    ci: tuple[float, float] | None = None
    algorithm: str | None = None
    relative_error: float | None = None
    why_not_relaxed: str | None = None
