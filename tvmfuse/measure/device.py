"""This machine as a measuring device: candidates are compiled, checked and timed in processes that may crash or hang.

    check          compile in one process, load and compare bits in another
    screen         time each candidate in that other process
    open_process   a fresh process with some kernels side by side, for pairs

A device is whatever has these three methods; one over RPC would differ in where its workers run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.target import Target

from .. import kernel as kernels_of
from ..errors import DeviceError, ScheduleRefused
from ..kernel.family import Kernel
from ..values import Candidate, Conv2d, Conv2dTranspose, Elementwise, Epilogue, Machine, Matmul, Measurement, Workload
from . import clock
from .worker import draw

SEED = 20
COMPILE_TIMEOUT_S = 300.0
# Processes that start, which takes a second of CPU each, while the compiler has only one core: one to screen, three for a first look.
SPARES = 4
# Of a relaxed candidate, relative to the largest result: on normal data F(4x4) is off by some 1e-6, a wrong kernel by 1e-2 and more.
MAX_RELATIVE_ERROR = 1e-4
DEATH_TIMEOUT_S = 5.0
BuildKernel = Callable[[Workload, Candidate, Machine], Kernel]


def constant_inputs(workload: Workload) -> tuple[bool, ...]:
    """For each of a kernel's inputs, the anchor's and then the operands, whether it is known when the model is compiled."""
    anchor = workload.anchor
    match anchor:
        case Matmul():
            own: tuple[bool, ...] = (False, anchor.constant_b)
        case Conv2d() | Conv2dTranspose():
            own = (False, True)
        case Elementwise():
            own = (False,)
        case _:
            own = (False, True, True, *[False] * (len(anchor.input_shapes()) - 3))
    return (*own, *(operand.constant for operand in workload.epilogue.operands))


def in_float64(workload: Workload) -> Workload:
    """The same computation with float64 wherever it has float32."""

    def wide(dtype: str) -> str:
        return "float64" if dtype == "float32" else dtype

    epilogue = workload.epilogue
    steps = tuple(dataclasses.replace(step, dtype=wide(step.dtype)) for step in epilogue.steps)
    operands = tuple(dataclasses.replace(operand, dtype=wide(operand.dtype)) for operand in epilogue.operands)
    return Workload(dataclasses.replace(workload.anchor, dtype=wide(workload.anchor.dtype)), Epilogue(steps, operands))


class Worker:
    """A child process that answers requests; what it cannot survive becomes a DeviceError here, and it is gone."""

    def __init__(self, threads: int) -> None:
        environment = os.environ | {
            "TVM_NUM_THREADS": str(threads),
            "TVM_BIND_THREADS": "0",  # TVM would pin its workers, not the main thread: every second process would be slow
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, bufsize=0,
        )  # fmt: skip
        self._received = b""

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> Any:
        """Raises DeviceError when the request fails, or when the process dies or doesn't answer in time."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            answer = json.loads(self._line(timeout_s))
        except TimeoutError:
            self.close()
            raise DeviceError(f"no answer within {timeout_s:.0f} s") from None
        except (OSError, EOFError):
            raise DeviceError(f"the process died: {self._cause_of_death()}") from None
        if "error" in answer:
            raise DeviceError(answer["error"])
        return answer["value"]

    def _line(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise EOFError
                self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line

    def _cause_of_death(self) -> str:
        try:
            status = self._process.wait(DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.close()
            return "it closed its pipe and stayed"
        if status >= 0:
            return f"exit status {status}"
        memory = " (out of memory?)" if -status == signal.SIGKILL else ""
        return f"{signal.Signals(-status).name}{memory}"

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass(frozen=True)
class _Compiled:
    kernel: Kernel
    library: Path
    index: int


class LocalDevice:
    """Candidates of one model's sites, on this machine's CPU.

    build_kernel  such as `kernel.build_kernel`. working_set: bytes that the model touches in one run.
    timeout_s     after which a kernel counts as hanging.
    Use it as a context manager: it keeps other tuning runs off the machine meanwhile. One workload is held at a time.
    Raises        DeviceError, on entering, when somebody else is measuring here.
    """

    def __init__(self, build_kernel: BuildKernel, target: Target, machine: Machine, working_set: int, timeout_s: float = 60.0) -> None:
        self._build_kernel, self._target, self._machine = build_kernel, target, machine
        self._working_set, self._timeout_s = working_set, timeout_s
        self._workload: Workload | None = None
        self._compiled: dict[Candidate, _Compiled] = {}
        self._compiler: Worker | None = None
        self._screener: Worker | None = None
        self._referenced: set[str | None] = set()  # algorithms whose reference the screener holds
        self._leaders: dict[str | None, Candidate] = {}  # algorithm -> the candidate that has its reference bits
        self._relative_errors: dict[str | None, float] = {}
        self._double: list[_Compiled] = []  # the workload in float64, once it was needed
        self._spares: list[Worker] = []

    def __enter__(self) -> LocalDevice:
        with contextlib.ExitStack() as stack:
            stack.enter_context(clock.quiet_machine())
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tvmfuse-")))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_screening()
        for worker in (*self._spares, *([self._compiler] if self._compiler else [])):
            worker.close()
        self._stack.close()

    # the three methods of a measurer

    def check(self, workload: Workload, candidates: Sequence[Candidate]) -> list[str | None]:
        """For each candidate why it can't be used, or None. candidates[0], the default, has to be sound.

        An exact candidate's bits have to be those of the first exact one, a relaxed candidate's those of the first of its algorithm,
        whose results have to be within MAX_RELATIVE_ERROR of float64's.
        """
        self._turn_to(workload)
        self._default = default = candidates[0]
        errors = self._compile([c for c in candidates if c not in self._compiled])
        for candidate in candidates:
            if default in errors:
                break
            if candidate not in errors:
                error = self._compare(candidate)
                if error is not None:
                    errors[candidate] = error
        return [errors.get(c, f"the default failed: {errors[default]}" if default in errors else None) for c in candidates]

    def screen(self, workload: Workload, candidates: Sequence[Candidate]) -> list[Measurement]:
        """One sample of each candidate, which has passed `check`."""
        return [self._sample(candidate) for candidate in candidates]

    @contextlib.contextmanager
    def open_process(self, workload: Workload, candidates: Sequence[Candidate]) -> Iterator[_Pairs]:
        """A fresh process with these kernels, which have passed `check`, in slots 0, 1, ...; kernels may repeat."""
        self._end_screening()
        worker = self._start()
        try:
            for slot, candidate in enumerate(candidates):
                self._load(worker, slot, candidate)
            yield _Pairs(worker, self._timeout_s)
        finally:
            worker.close()

    # how

    def _turn_to(self, workload: Workload) -> None:
        if workload == self._workload:
            return
        self._end_screening()
        for library in {compiled.library for compiled in (*self._compiled.values(), *self._double)}:
            library.unlink()
        self._workload, self._compiled, self._double = workload, {}, []
        self._leaders, self._relative_errors = {}, {}
        self._streamed = clock.stream_bytes(workload, self._machine, self._working_set)
        self._is_constant = constant_inputs(workload)

    def _compile(self, candidates: Sequence[Candidate]) -> dict[Candidate, str]:
        """Into one library; if that fails, each candidate alone, so that only the culprits fail."""
        assert self._workload is not None
        errors: dict[Candidate, str] = {}
        kernels: dict[Candidate, Kernel] = {}
        for candidate in candidates:
            try:
                kernels[candidate] = self._build_kernel(self._workload, candidate, self._machine)
            except ScheduleRefused as refusal:
                errors[candidate] = str(refusal)
        try:
            self._compile_together(kernels)
        except DeviceError as error:
            for candidate, kernel in kernels.items():
                try:
                    if len(kernels) == 1:
                        raise error
                    self._compile_together({candidate: kernel})
                except DeviceError as cause:
                    errors[candidate] = f"doesn't compile: {cause}"
        return errors

    def _compile_together(self, kernels: dict[Candidate, Kernel]) -> None:
        if kernels:
            compiled = self._link(list(kernels.values()))
            self._compiled |= dict(zip(kernels, compiled, strict=True))

    def _link(self, kernels: list[Kernel]) -> list[_Compiled]:
        activations = [i for i, constant in enumerate(self._is_constant) if not constant]
        module = clock.timed_module(kernels, activations, self._streamed, self._machine.threads)
        if self._compiler is None or not self._compiler.alive:
            self._compiler = Worker(threads=1)
        source, library = self._folder / "module.json", self._folder / f"{time.monotonic_ns()}.so"
        source.write_text(tvm.ir.save_json([module, self._target]))
        self._spares += [Worker(self._machine.threads) for _ in range(SPARES - len(self._spares))]
        self._compiler.ask("compile", COMPILE_TIMEOUT_S, module=str(source), library=str(library))
        for spare in self._spares:
            spare.ask("ready", COMPILE_TIMEOUT_S)
        return [_Compiled(kernel, library, i) for i, kernel in enumerate(kernels)]

    def _start(self) -> Worker:
        """A process that nothing has run in."""
        worker = self._spares.pop() if self._spares else Worker(self._machine.threads)
        worker.ask("open", self._timeout_s, streamed=self._streamed, threads=self._machine.threads, seed=SEED)
        return worker

    def _screening(self) -> Worker:
        """The process that checks and screens."""
        if self._screener is None or not self._screener.alive:
            self._screener, self._referenced = self._start(), set()
            self._refer_to(self._screener, self._default)
        return self._screener

    def _refer_to(self, worker: Worker, leader: Candidate) -> None:
        """Have the leader's results in the process as the reference for its algorithm."""
        if leader.algorithm not in self._referenced:
            self._load(worker, 0, leader)
            if leader.algorithm and leader.algorithm not in self._relative_errors:
                self._measure_error(worker, leader)
            worker.ask("reference", self._timeout_s, slot=0, algorithm=str(leader.algorithm))
            self._referenced.add(leader.algorithm)
            self._leaders[leader.algorithm] = leader

    def _measure_error(self, worker: Worker, relaxed: Candidate) -> None:
        """Of a relaxed candidate, which is in slot 0. Raises DeviceError when it is off by too much."""
        assert self._workload is not None
        if not self._double:
            double = in_float64(self._workload)
            self._double = self._link([kernels_of.build_kernel(double, kernels_of.candidates(double, self._machine)[0], self._machine)])
        self._load_compiled(worker, 1, self._double[0])
        worker.ask("take_precise", self._timeout_s, slot=1)
        error = worker.ask("relative_error", self._timeout_s, slot=0)
        if not error <= MAX_RELATIVE_ERROR:  # NaN neither
            raise DeviceError(f"wrong results: off by {error:.2g} of the largest from float64")
        self._relative_errors[relaxed.algorithm] = error

    def _end_screening(self) -> None:
        if self._screener:
            self._screener.close()
        self._screener = None

    def _compare(self, candidate: Candidate) -> str | None:
        try:
            worker = self._screening()
            self._refer_to(worker, self._leaders.get(candidate.algorithm, candidate))
            self._load(worker, 1, candidate)
            return worker.ask("compare", self._timeout_s, slot=1, algorithm=str(candidate.algorithm))
        except DeviceError as failure:
            self._end_screening()  # what else did it write? The next one gets a new process
            return str(failure)

    def _sample(self, candidate: Candidate) -> Measurement:
        try:
            worker = self._screening()
            self._load(worker, 1, candidate)
            seconds = worker.ask("time", self._timeout_s, slot=1)
            return Measurement(candidate, (seconds,), relative_error=self._relative_errors.get(candidate.algorithm))
        except DeviceError as failure:
            return Measurement(candidate, error=str(failure))

    def _load(self, worker: Worker, slot: int, candidate: Candidate) -> None:
        self._load_compiled(worker, slot, self._compiled[candidate])

    def _load_compiled(self, worker: Worker, slot: int, compiled: _Compiled) -> None:
        kernel = compiled.kernel
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            constants = {}
            for i in range(kernel.inputs):
                if self._is_constant[i]:
                    path, array = Path(folder) / f"{i}.npy", self._constant(kernel, i)
                    np.save(path, array)
                    constants[str(i)] = str(path), hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
            worker.ask(
                "load", self._timeout_s, slot=slot, library=str(compiled.library), index=compiled.index, inputs=kernel.inputs,
                buffers=[(b.shape, b.dtype) for b in kernel.buffers], results=kernel.results, constants=constants,
            )  # fmt: skip

    def _constant(self, kernel: Kernel, index: int) -> np.ndarray:
        """The same canonical numbers for every candidate, packed as this one wants them; weights keep sums near 1."""
        assert self._workload is not None
        anchor, operands = self._workload.anchor, self._workload.epilogue.operands
        own = anchor.input_shapes()
        is_weight = index < len(own)
        shape, dtype = (own[index], anchor.dtype) if is_weight else (operands[index - len(own)].shape, operands[index - len(own)].dtype)
        array = draw(np.random.default_rng((SEED, index)), shape, dtype)
        if is_weight:
            terms = anchor.flop() / 2 / max(1, math.prod(anchor.output_shape()))
            array = (array / math.sqrt(max(1.0, terms))).astype(dtype)
        array = array.astype(kernel.buffers[index].dtype)  # the very same numbers for a kernel in float64
        packer = kernel.packers.get(index)
        return np.ascontiguousarray(packer(array) if packer else array)


@dataclass(frozen=True)
class _Pairs:
    worker: Worker
    timeout_s: float

    def pair(self, first: int, second: int) -> tuple[float, float]:
        """Seconds of the kernel in slot `first`, then in slot `second`. Raises DeviceError when one crashes or hangs."""
        a, b = self.worker.ask("pair", self.timeout_s, first=first, second=second)
        return a, b
