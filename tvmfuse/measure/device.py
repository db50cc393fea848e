"""Candidates compiled here, checked and timed in processes that may crash or hang: here, or on devices over RPC.

    check          compile in processes that do only that, load and compare bits in another
    screen         time each candidate in that other process
    open_process   a fresh process with some kernels side by side, for pairs

A device is whatever has these three methods. Where its processes run is a `Place`; several equal ones share out the candidates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tvm
from tvm.target import Target

from .. import kernel as kernels_of
from ..errors import DeviceError, DeviceLost, ScheduleRefused
from ..kernel.family import Kernel, Packer
from ..processors import default_threads
from ..values import Candidate, Conv2d, Conv2dTranspose, Elementwise, Epilogue, Machine, Matmul, Measurement, Workload
from . import clock
from .forkserver import ForkServer, Worker
from .host import is_foreign
from .pool import Pool
from .worker import draw

SEED = 20
COMPILE_TIMEOUT_S = 300.0
# Of a relaxed candidate, relative to the largest result: on normal data F(4x4) is off by some 1e-6, a wrong kernel by 1e-2 and more.
MAX_RELATIVE_ERROR = 1e-4
KEPT_BYTES = 1 << 28  # of packed weights, for the next process that loads them
SLOWEST_LINK = 1e6  # bytes/s to a device: a crowded wireless one
BuildKernel = Callable[[Workload, Candidate, Machine], Kernel]


class Runner(Protocol):
    """A process that answers what `worker` says, here or elsewhere."""

    alive: bool

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> Any:
        """Raises DeviceError when the request fails or the process dies, DeviceLost when the device it runs on is gone."""

    def close(self) -> None: ...


class Place:
    """Where runners run: this machine. It keeps the process that checks and screens, which belongs to one device at a time."""

    screener: Runner | None = None
    screens_for: object = None
    referenced: frozenset[str | None] = frozenset()  # algorithms whose reference the screener holds

    def __init__(self, server: ForkServer) -> None:
        self._server = server

    def start(self, threads: int) -> Runner:
        """A process that nothing has run in. Raises DeviceLost when the place is gone."""
        return self._server.start(threads)

    def put(self, path: Path) -> str:
        """What a runner calls this file."""
        return str(path)

    def end_screening(self) -> None:
        if self.screener:
            self.screener.close()
        self.screener = None


def stored(array: np.ndarray, folder: Path) -> tuple[Path, str]:
    """The file of an array, and a digest of its bytes, shape and dtype, which names it: equal arrays share it."""
    digest = hashlib.blake2b(f"{array.dtype} {array.shape}".encode(), digest_size=16)
    digest.update(array.reshape(-1).view(np.uint8).data)
    path = folder / f"{digest.hexdigest()}.npy"
    if not path.exists():
        np.save(path, array)
    return path, digest.hexdigest()


def transfer_s(paths: Iterable[Path]) -> float:
    """Seconds that these files may take to a device."""
    return sum(path.stat().st_size for path in paths) / SLOWEST_LINK


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


@dataclass(frozen=True)
class _Compiled:
    kernel: Kernel
    library: Path
    index: int
    condition: str


class Device:
    """Candidates of one model's sites, measured on equal places; one workload is held at a time.

    build_kernel  such as `kernel.build_kernel`. working_set: bytes that the model touches in one run.
    server        starts the processes that compile. timeout_s: after which a kernel counts as hanging.
    Use it as a context manager. Several may share a pool and a server, each in a thread of its own.
    Raises        DeviceLost, from each method, when no place is left.
    """

    def __init__(
        self,
        build_kernel: BuildKernel,
        target: Target,
        machine: Machine,
        working_set: int,
        pool: Pool[Place],
        server: ForkServer,
        timeout_s: float = 60.0,
    ) -> None:
        self._build_kernel, self._target, self._machine = build_kernel, target, machine
        self._working_set, self._pool, self._server, self._timeout_s = working_set, pool, server, timeout_s
        self._workload: Workload | None = None
        self._default: Candidate | None = None
        self._compiled: dict[Candidate, _Compiled] = {}
        self._compilers: list[Worker] = []
        self._is_over = False  # something was interrupted: nothing is tried again
        self._libraries = itertools.count()
        self._constants = _Constants()
        self._canonical: dict[int, np.ndarray] = {}  # constants as the model has them
        self._referring = threading.Lock()  # one place at a time finds out what the others refer to
        self._leaders: dict[str | None, Candidate] = {}  # algorithm -> the candidate that has its reference bits
        self._relative_errors: dict[str | None, float] = {}
        self._double: list[_Compiled] = []  # the workload in float64, once it was needed

    def __enter__(self) -> Device:
        self._temporary = tempfile.TemporaryDirectory(prefix="tvmfuse-")
        self._folder = Path(self._temporary.name)
        return self

    def __exit__(self, *_: object) -> None:
        for compiler in self._compilers:
            compiler.close()
        self._temporary.cleanup()

    # the three methods of a measurer

    def check(self, workload: Workload, candidates: Sequence[Candidate]) -> list[str | None]:
        """For each candidate why it can't be used, or None. candidates[0], the default, has to be sound.

        An exact candidate's bits have to be those of the first exact one, a relaxed candidate's those of the first of its algorithm,
        whose results have to be within MAX_RELATIVE_ERROR of float64's.
        """
        self._turn_to(workload)
        default = candidates[0]
        if default != self._default:
            self._default, self._leaders, self._relative_errors = default, {}, {}
        errors: dict[Candidate, str | None] = dict(self._compile([c for c in candidates if c not in self._compiled]))
        if default not in errors:
            sound = [c for c in candidates if c not in errors]
            errors |= dict(zip(sound, self._pool.map(self._compare, sound), strict=True))
        failed = errors.get(default)
        return [errors.get(c) or (f"the default failed: {failed}" if failed else None) for c in candidates]

    def screen(self, workload: Workload, candidates: Sequence[Candidate]) -> list[Measurement]:
        """One sample of each candidate, which has passed `check`."""
        self._constants.trim(KEPT_BYTES)
        return self._pool.map(self._sample, candidates)

    @contextlib.contextmanager
    def open_process(self, workload: Workload, candidates: Sequence[Candidate]) -> Iterator[_Pairs]:
        """A fresh process with these kernels, which have passed `check`, in slots 0, 1, ...; kernels may repeat.

        When its place is lost, another one takes over from the next pair on: both times of a pair are of one process.
        """
        self._constants.trim(KEPT_BYTES)
        with _Pairs(lambda place: self._fresh(place, candidates), self._pool, self._timeout_s) as pairs:
            yield pairs

    # how

    def _turn_to(self, workload: Workload) -> None:
        if workload == self._workload:
            return
        for library in {compiled.library for compiled in (*self._compiled.values(), *self._double)}:
            library.unlink()
        self._constants.trim(0)
        self._constants, self._canonical = _Constants(), {}
        self._workload, self._compiled, self._double = workload, {}, []
        self._default = None
        self._streamed = clock.stream_bytes(workload, self._machine, self._working_set)
        self._is_constant = constant_inputs(workload)

    def _compile(self, candidates: Sequence[Candidate]) -> dict[Candidate, str]:
        """Into a library a compiler; if one fails, each of its candidates alone, so that only the culprits fail."""
        assert self._workload is not None
        errors: dict[Candidate, str] = {}
        kernels: dict[Candidate, Kernel] = {}
        for candidate in candidates:
            try:
                kernels[candidate] = self._build_kernel(self._workload, candidate, self._machine)
            except ScheduleRefused as refusal:
                errors[candidate] = str(refusal)
        shares = [dict(list(kernels.items())[i :: default_threads()]) for i in range(min(default_threads(), len(kernels)))]
        self._compilers += [self._server.start(threads=1) for _ in range(len(shares) - len(self._compilers))]
        with ThreadPoolExecutor(max(1, len(shares))) as executor:
            try:
                for failed in executor.map(self._compile_share, range(len(shares)), shares):
                    errors |= failed
            except BaseException:  # the executor waits for its threads, and they would compile to the end
                self._is_over = True
                for compiler in self._compilers:
                    compiler.close()
                raise
        return errors

    def _compile_share(self, number: int, kernels: dict[Candidate, Kernel]) -> dict[Candidate, str]:
        try:
            self._compile_together(number, kernels)
            return {}
        except DeviceError as error:
            if len(kernels) == 1 or self._is_over:
                return dict.fromkeys(kernels, f"doesn't compile: {error}")
        errors: dict[Candidate, str] = {}
        for candidate, kernel in kernels.items():
            errors |= self._compile_share(number, {candidate: kernel})
        return errors

    def _compile_together(self, number: int, kernels: dict[Candidate, Kernel]) -> None:
        self._compiled |= dict(zip(kernels, self._link(number, list(kernels.values())), strict=True))

    def _link(self, number: int, kernels: Sequence[Kernel]) -> list[_Compiled]:
        """By one of the compilers, into one library."""
        activations = [i for i, constant in enumerate(self._is_constant) if not constant]
        timed = clock.timed_module(kernels, activations, self._streamed, self._machine.threads)
        if not self._compilers[number].alive:
            self._compilers[number] = self._server.start(threads=1)
        source = self._folder / f"module{number}.json"
        # Objects are linked on the device where there may be no linker for it here
        library = self._folder / f"{next(self._libraries)}.{'tar' if is_foreign(self._target) else 'so'}"
        source.write_text(tvm.ir.save_json([timed.module, self._target]))
        self._compilers[number].ask("compile", COMPILE_TIMEOUT_S, module=str(source), library=str(library))
        return [_Compiled(kernel, library, i, timed.conditions[i]) for i, kernel in enumerate(kernels)]

    def _start(self, place: Place) -> Runner:
        runner = place.start(self._machine.threads)
        runner.ask("open", self._timeout_s, streamed=self._streamed, threads=self._machine.threads, seed=SEED)
        return runner

    def _fresh(self, place: Place, candidates: Sequence[Candidate]) -> Runner:
        place.end_screening()
        runner = self._start(place)
        try:
            for slot, candidate in enumerate(candidates):
                self._load(place, runner, slot, self._compiled[candidate])
        except BaseException:
            runner.close()
            raise
        return runner

    def _screening(self, place: Place) -> Runner:
        """The process that checks and screens."""
        assert self._default is not None
        wanted = self, self._workload, self._default
        if place.screener is None or not place.screener.alive or place.screens_for != wanted:
            place.end_screening()
            place.screener, place.screens_for, place.referenced = self._start(place), wanted, frozenset()
            self._refer_to(place, place.screener, self._default)
        return place.screener

    def _refer_to(self, place: Place, runner: Runner, candidate: Candidate) -> None:
        """Have the results of the leader of a candidate's algorithm in the process as the reference; without one, the candidate leads."""
        algorithm = candidate.algorithm
        if algorithm in place.referenced:
            return
        with self._referring:
            leader = self._leaders.get(algorithm, candidate)
            self._load(place, runner, 0, self._compiled[leader])
            if algorithm and algorithm not in self._relative_errors:
                self._measure_error(place, runner, leader)
            runner.ask("reference", self._timeout_s, slot=0, algorithm=str(algorithm))
            self._leaders[algorithm] = leader
        place.referenced |= {algorithm}

    def _measure_error(self, place: Place, runner: Runner, relaxed: Candidate) -> None:
        """Of a relaxed candidate, which is in slot 0. Raises DeviceError when it is off by too much."""
        assert self._workload is not None
        if not self._double:
            double = in_float64(self._workload)
            self._double = self._link(0, [kernels_of.build_kernel(double, kernels_of.candidates(double, self._machine)[0], self._machine)])
        self._load(place, runner, 1, self._double[0])
        runner.ask("take_precise", self._timeout_s, slot=1)
        error = runner.ask("relative_error", self._timeout_s, slot=0)
        if not error <= MAX_RELATIVE_ERROR:  # NaN neither
            raise DeviceError(f"wrong results: off by {error:.2g} of the largest from float64")
        self._relative_errors[relaxed.algorithm] = error

    def _compare(self, place: Place, candidate: Candidate) -> str | None:
        try:
            runner = self._screening(place)
            self._refer_to(place, runner, candidate)
            self._load(place, runner, 1, self._compiled[candidate])
            return runner.ask("compare", self._timeout_s, slot=1, algorithm=str(candidate.algorithm))
        except DeviceError as failure:
            place.end_screening()  # what else did it write? The next one gets a new process
            return str(failure)

    def _sample(self, place: Place, candidate: Candidate) -> Measurement:
        try:
            runner = self._screening(place)
            self._load(place, runner, 1, self._compiled[candidate])
            seconds = runner.ask("time", self._timeout_s, slot=1)
            return Measurement(candidate, (seconds,), relative_error=self._relative_errors.get(candidate.algorithm))
        except DeviceError as failure:
            return Measurement(candidate, error=str(failure))

    def _load(self, place: Place, runner: Runner, slot: int, compiled: _Compiled) -> None:
        kernel = compiled.kernel
        constants, sent = {}, list[Path]()
        for i in range(kernel.inputs):
            if self._is_constant[i]:
                how = i, kernel.buffers[i].dtype, kernel.packers.get(i)  # many candidates pack alike
                path, digest = self._constants.file(how, self._folder, functools.partial(self._constant, *how))
                constants[str(i)] = place.put(path), digest
                sent.append(path)
        runner.ask(
            "load", self._timeout_s + transfer_s(sent),
            slot=slot, library=place.put(compiled.library), index=compiled.index, condition=compiled.condition,
            inputs=kernel.inputs, buffers=[(b.shape, b.dtype) for b in kernel.buffers], results=kernel.results, constants=constants,
        )  # fmt: skip

    def _constant(self, index: int, dtype: str, packer: Packer | None) -> np.ndarray:
        """The same canonical numbers for every candidate, packed as it wants them."""
        if index not in self._canonical:
            self._canonical[index] = self._draw_constant(index)
        array = self._canonical[index].astype(dtype)  # the very same numbers for a kernel in float64
        return np.ascontiguousarray(packer(array) if packer else array)

    def _draw_constant(self, index: int) -> np.ndarray:
        """Weights keep sums near 1."""
        assert self._workload is not None
        anchor, operands = self._workload.anchor, self._workload.epilogue.operands
        own = anchor.input_shapes()
        is_weight = index < len(own)
        shape, dtype = (own[index], anchor.dtype) if is_weight else (operands[index - len(own)].shape, operands[index - len(own)].dtype)
        array = draw(np.random.default_rng((SEED, index)), shape, dtype)
        if is_weight:
            terms = anchor.flop() / 2 / max(1, math.prod(anchor.output_shape()))
            array = (array / math.sqrt(max(1.0, terms))).astype(dtype)
        return array


class _Constants:
    """Packed weights as files."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._digests: dict[object, str] = {}
        self._paths: dict[str, Path] = {}

    def file(self, key: object, folder: Path, make: Callable[[], np.ndarray]) -> tuple[Path, str]:
        """Where make() is, and its digest; equal keys make equal arrays."""
        with self._lock:
            if self._digests.get(key) not in self._paths:
                path, self._digests[key] = stored(make(), folder)
                self._paths[self._digests[key]] = path
            return self._paths[self._digests[key]], self._digests[key]

    def trim(self, to_bytes: int) -> None:
        """Delete the oldest beyond so many bytes, while nobody loads them."""
        kept = 0
        for digest, path in reversed(list(self._paths.items())):
            kept += path.stat().st_size
            if kept > to_bytes:
                path.unlink()
                del self._paths[digest]


class _Pairs:
    """A fresh process for pairs, which `begin` starts on a place of the pool; a new one elsewhere when that place is lost."""

    def __init__(self, begin: Callable[[Place], Runner], pool: Pool[Place], timeout_s: float) -> None:
        self._begin, self._pool, self._timeout_s = begin, pool, timeout_s

    def __enter__(self) -> _Pairs:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._place is not None:
            self._runner.close()
            self._pool.give_back(self._place)

    def pair(self, first: int, second: int) -> tuple[float, float]:
        """Seconds of the kernel in slot `first`, then in slot `second`.

        Raises DeviceError when one crashes or hangs, DeviceLost when two places in a row are lost, or the last one.
        """
        try:
            a, b = self._runner.ask("pair", self._timeout_s, first=first, second=second)
        except DeviceLost as loss:
            self._lose(loss)
            self._start()
            try:
                a, b = self._runner.ask("pair", self._timeout_s, first=first, second=second)
            except DeviceLost as again:
                self._lose(again)
                raise
        return a, b

    def _start(self) -> None:
        for again in (True, False):
            self._place: Place | None = self._pool.take()
            try:
                self._runner = self._begin(self._place)
                return
            except DeviceLost as loss:
                self._lose(loss)
                if not again:
                    raise
            except BaseException:
                self._pool.give_back(self._place)
                raise

    def _lose(self, loss: DeviceLost) -> None:
        assert self._place is not None
        self._pool.lose(self._place, loss)
        self._place = None


class LocalDevice(Device):
    """This machine's CPU. It keeps other tuning runs off the machine meanwhile.

    Raises  DeviceError, on entering, when somebody else is measuring here.
    """

    def __init__(self, build_kernel: BuildKernel, target: Target, machine: Machine, working_set: int, timeout_s: float = 60.0) -> None:
        server = ForkServer()
        super().__init__(build_kernel, target, machine, working_set, Pool([Place(server)]), server, timeout_s)

    def __enter__(self) -> LocalDevice:
        with contextlib.ExitStack() as stack:
            stack.callback(self._server.close)
            stack.enter_context(clock.quiet_machine())
            super().__enter__()
            stack.push(super().__exit__)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
