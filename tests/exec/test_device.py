"""The local device with a tiny family of its own: a vector add, and every way in which a candidate can go wrong."""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvmfuse.decide.log import Conditions, Log
from tvmfuse.decide.search import tune_site
from tvmfuse.errors import DeviceError, ScheduleRefused, UnsupportedError, UsageError
from tvmfuse.kernel.family import Buffer, Kernel, Launch
from tvmfuse.measure import clock, worker
from tvmfuse.measure import device as device_module
from tvmfuse.measure.device import LocalDevice, constant_inputs, stored
from tvmfuse.measure.host import host, host_target, isa_of, machine, parse_target, required_features, toolchain
from tvmfuse.values import AVX2, AVX512, NEON, Candidate, Elementwise, Epilogue, Machine, Matmul, Operand, Recurrent, Step, Workload

N = 1024
SIGILL, SIGFPE, SIGKILL, SIGSEGV = 4, 8, 9, 11
GREED = 1 << 32  # bytes
WORKLOAD = Workload(Elementwise((N,)), Epilogue((Step("add", ("%0", "$0")),), (Operand((N,), (0,), constant=True),)))
TARGET = host_target()
MACHINE = machine(TARGET, 1)


def how(name: str) -> Candidate:
    return Candidate("register", 1, (("how", name),))


DEFAULT = how("vector")


def function(body: Callable[..., None], count: int = 3) -> tirx.PrimFunc:
    with IRBuilder() as builder, T.prim_func():
        T.func_name("add")
        T.func_attr({"tirx.is_scheduled": True})
        body(*(T.arg(f"p{i}", T.buffer((N,), "float32")) for i in range(count)))
    return builder.get()


def add(lanes: int = 1, extent: int = N, extra: float = 0.0, wait_us: int = 0) -> Callable[..., None]:
    def body(a: tirx.Buffer, b: tirx.Buffer, c: tirx.Buffer) -> None:
        if wait_us:
            calling("usleep", wait_us)()
        with T.serial(0, extent // lanes) as i:
            at = tirx.Ramp(i * lanes, 1, lanes) if lanes > 1 else i
            value = tirx.BufferLoad(a, [at]) + tirx.BufferLoad(b, [at])
            T.buffer_store(c, value + tirx.const(extra, "float32") if extra else value, [at])

    return body


def calling(name: str, *args: int) -> Callable[..., None]:
    return lambda *_: T.evaluate(tirx.call_extern("int32", name, *args))


def fill_unseen(*_: tirx.Buffer) -> None:
    """Memory that a kernel takes itself, without looking whether it gets any. What malloc gives and nobody reads LLVM leaves out."""
    length = tirx.const(GREED, "uint64")
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = tirx.call_extern("handle", "mmap", tirx.const(0, "uint64"), length, protection, flags, -1, tirx.const(0, "int64"))
    T.evaluate(tirx.call_extern("handle", "memset", memory, 0, length))


def unbound(a: tirx.Buffer, b: tirx.Buffer, c: tirx.Buffer) -> None:
    T.buffer_store(c, tirx.const(0.0, "float32"), [tirx.Var("nowhere", "int32")])


BODIES: dict[str, Callable[..., None]] = {
    "vector": add(8),
    "serial": add(),
    "slow": add(8, wait_us=300),
    "off by one ulp": add(extra=1e-7),
    "half": add(extent=N // 2),
    "outside": add(extent=N + 1),
    "segfault": calling("raise", SIGSEGV),
    "illegal instruction": calling("raise", SIGILL),
    "division by zero": calling("raise", SIGFPE),
    "out of memory": calling("raise", SIGKILL),  # as Linux ends the process that took the most
    "greedy": fill_unseen,
    "hang": calling("pause"),
    "exit": calling("exit", 3),
    "uncompilable": unbound,
}


def build_kernel(workload: Workload, candidate: Candidate, machine: Machine) -> Kernel:
    name = candidate["how"]
    buffer = Buffer((N,))
    if name == "refused":
        raise ScheduleRefused("needs 40 registers, has 32")
    if name == "two launches":
        both = Launch(function(BODIES["vector"]), (0, 1, 2)), Launch(function(lambda a, c: add_zero(a, c), 2), (2, 3))
        return Kernel((buffer,) * 4, 2, (3,), both)
    if name == "large scratch":
        return Kernel((*(buffer,) * 3, Buffer((GREED // 4,))), 2, (2,), (Launch(function(BODIES["vector"]), (0, 1, 2)),))
    if name == "packed":
        return Kernel((buffer,) * 3, 2, (2,), (Launch(function(reversed_add), (0, 1, 2)),), {1: lambda b: b[::-1]})
    return Kernel((buffer,) * 3, 2, (2,), (Launch(function(BODIES[name]), (0, 1, 2)),))


def add_zero(a: tirx.Buffer, c: tirx.Buffer) -> None:
    with T.serial(0, N) as i:
        T.buffer_store(c, tirx.BufferLoad(a, [i]), [i])


def reversed_add(a: tirx.Buffer, b: tirx.Buffer, c: tirx.Buffer) -> None:
    with T.serial(0, N) as i:
        T.buffer_store(c, tirx.BufferLoad(a, [i]) + tirx.BufferLoad(b, [N - 1 - i]), [i])


@pytest.fixture(autouse=True)
def free_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other test processes may hold the machine's lock."""
    monkeypatch.setattr(clock.tempfile, "gettempdir", lambda: str(tmp_path))


@contextlib.contextmanager
def device(working_set: int = 1 << 20, timeout_s: float = 30.0) -> Iterator[LocalDevice]:
    with LocalDevice(build_kernel, TARGET, MACHINE, working_set, timeout_s) as entered:
        yield entered


def test_equal_bits_pass_and_are_timed_alone_and_in_pairs() -> None:
    names = ["vector", "serial", "two launches", "packed", "slow"]
    candidates = [how(name) for name in names]
    with device() as local:
        assert local.check(WORKLOAD, candidates) == [None] * len(names)
        seconds = {m.candidate["how"]: m.times_s[0] for m in local.screen(WORKLOAD, candidates)}
        assert all(s > 0 for s in seconds.values()) and seconds["slow"] > 300e-6 > seconds["vector"]
        with local.open_process(WORKLOAD, [DEFAULT, DEFAULT, how("slow")]) as process:
            first, second = process.pair(0, 2)
            assert second > 300e-6 > first
            first, second = process.pair(2, 1)
            assert first > 300e-6 > second
            os.kill(process._runner.pid, signal.SIGKILL)
            with pytest.raises(DeviceError, match="SIGKILL"):
                process.pair(0, 1)


class Compiler:
    """It compiles until it is closed, or is interrupted as soon as another one has begun."""

    def __init__(self, other: Compiler | None = None) -> None:
        self.alive, self._other, self._began, self._closed = True, other, threading.Event(), threading.Event()
        self.asked: list[bool] = []  # whether it was closed meanwhile

    def ask(self, *_: object, **__: object) -> None:
        if self._other:
            self._other._began.wait(30)
            raise KeyboardInterrupt
        self._began.set()
        self.asked.append(self._closed.wait(30))
        raise DeviceError("the process is gone")

    def close(self) -> None:
        self._closed.set()


def test_interrupted_compiling_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "default_threads", lambda: 2)
    endless = Compiler()
    with device() as local:
        local._compilers = [Compiler(endless), endless]  # type: ignore[list-item]
        with pytest.raises(KeyboardInterrupt):
            local.check(WORKLOAD, [how(name) for name in ("vector", "serial", "half", "slow")])
        assert endless.asked == [True], "closed at once, and nothing was tried again"


def test_every_kind_of_failure_is_its_own_candidates_alone() -> None:
    expected = {
        "vector": None,
        "off by one ulp": "wrong bits",
        "half": "wrong bits: 512 of 1024 elements",
        "outside": "wrote outside",
        "segfault": "SIGSEGV",
        "illegal instruction": "SIGILL",
        "division by zero": "SIGFPE",
        "out of memory": "SIGKILL (out of memory?)",
        "exit": "exit status 3",
        "refused": "40 registers",
        "serial": None,
    }
    with device() as local:
        errors = dict(zip(expected, local.check(WORKLOAD, [how(name) for name in expected]), strict=True))
    for name, part in expected.items():
        assert (errors[name] is None) if part is None else (part in (errors[name] or "")), f"{name}: {errors[name]}"


def test_candidate_that_does_not_compile_or_hangs_leaves_the_others() -> None:
    with device(timeout_s=8.0) as local:
        errors = local.check(WORKLOAD, [DEFAULT, how("uncompilable"), how("hang")])
    assert errors[0] is None and "doesn't compile" in (errors[1] or "") and errors[2] == "no answer within 8 s"


def test_failing_default_fails_all() -> None:
    with device() as local:
        errors = local.check(WORKLOAD, [how("refused"), how("serial")])
    assert errors == ["needs 40 registers, has 32", "the default failed: needs 40 registers, has 32"]


def relaxed(name: str) -> Candidate:
    return Candidate("register", 1, (("algorithm", "winograd4"), ("how", name)))


def test_relaxed_candidates_are_compared_with_their_own_kind_and_their_error_is_measured() -> None:
    candidates = [DEFAULT, how("serial"), relaxed("off by one ulp"), relaxed("vector"), how("off by one ulp")]
    with device() as local:
        errors = local.check(WORKLOAD, candidates)
        measured = local.screen(WORKLOAD, candidates[:3])
    assert errors[:3] == [None, None, None]
    assert "wrong bits" in (errors[3] or "") and "wrong bits" in (errors[4] or "")
    assert [m.relative_error for m in measured[:2]] == [None, None]
    assert 1e-9 < (measured[2].relative_error or 0) < 1e-6


def test_relaxed_candidate_that_is_far_off_is_refused_and_the_next_one_leads() -> None:
    with device() as local:
        errors = local.check(WORKLOAD, [DEFAULT, relaxed("half"), relaxed("vector")])
        assert "wrong results: off by" in (errors[1] or "") and (errors[0], errors[2]) == (None, None)
        assert local.check(WORKLOAD, [DEFAULT, relaxed("serial")]) == [None, None]


def test_default_may_be_relaxed() -> None:
    with device() as local:
        assert local.check(WORKLOAD, [relaxed("vector"), how("serial"), how("off by one ulp")])[:2] == [None, None]
    with device() as local:
        errors = local.check(WORKLOAD, [relaxed("half"), how("serial")])
    assert all("wrong results" in (error or "") for error in errors)


def test_second_run_on_one_machine_is_refused() -> None:
    with device(), pytest.raises(DeviceError, match="another process is measuring"), device():
        pass


def test_tuning_loop_drives_the_device(tmp_path: Path) -> None:
    """The default is slow by a factor that no noise hides."""
    here = Conditions(host(), 1, toolchain(), "test")
    slow = how("slow")
    with device() as local:
        found = tune_site(WORKLOAD, [slow, how("vector"), how("segfault")], local, Log([tmp_path]), here)
    assert found.choice == how("vector") and found.verdict is not None and found.verdict.ratio < 0.5
    assert [f.candidate for f in found.failures] == [how("segfault")]


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limit is set from outside, as Linux can")
def test_tuning_goes_on_where_memory_runs_out(tmp_path: Path) -> None:
    here = Conditions(host(), 1, toolchain(), "test")
    greedy = [how("large scratch"), how("greedy")]
    log = Log([tmp_path])
    with device() as local:
        local._server.start(1).close()  # it has imported all that it will
        size = psutil.Process(local._server._process.pid).memory_info().vms + (3 << 30)  # what it forks skips up to 1 GiB of addresses
        resource.prlimit(local._server._process.pid, resource.RLIMIT_AS, (size, size))
        found = tune_site(WORKLOAD, [how("slow"), *greedy, how("vector")], local, log, here)
    assert found.choice == how("vector") and found.finished
    errors = {failure.candidate: failure.error or "" for failure in found.failures}
    assert errors.keys() == set(greedy)
    assert "Cannot allocate memory" in errors[greedy[0]] and "the process died: SIGSEGV" in errors[greedy[1]]


def test_conditioning_streams_what_others_touch_but_no_more_than_twice_the_last_level() -> None:
    here = Machine(AVX512, l1=32 << 10, l2=1 << 20, l3=32 << 20)
    site = WORKLOAD.bytes_moved()
    assert site == 3 * 4 * N
    assert clock.stream_bytes(WORKLOAD, here, site + (1 << 20)) == 1 << 20
    assert clock.stream_bytes(WORKLOAD, here, 1 << 40) == 64 << 20
    assert clock.stream_bytes(WORKLOAD, here, site + 1000) == 0


def sampled_s(streamed: int) -> float:
    timed = clock.timed_module([build_kernel(WORKLOAD, DEFAULT, MACHINE)], [0], streamed, threads=1)
    memories = [worker.Memory((extent,), "float32") for extent in (N, N, N, *clock.conditioning_shapes(streamed, threads=1))]
    built = tvm.compile(timed.module, TARGET).mod
    return clock.Stopwatch(built, 0, timed.conditions[0], [memory.tensor for memory in memories], hot=not streamed).sample()


def test_conditioning_comes_before_each_run() -> None:
    """Operands that a stream has evicted cost more than those that a run before has left in the cache."""
    assert sampled_s(streamed=2 * MACHINE.l3) > 1.5 * sampled_s(streamed=0)


def test_launches_that_candidates_share_are_compiled_once() -> None:
    kernels = [build_kernel(WORKLOAD, how(name), MACHINE) for name in ("vector", "vector", "two launches")]
    timed = clock.timed_module(kernels, [0], 0, 1)
    names = {str(name.name_hint) for name in timed.module.functions}
    assert len([name for name in names if name.startswith("launch")]) == 2
    # "two launches" has a scratch buffer more
    assert len(set(timed.conditions)) == 2 and set(timed.conditions) < names


def test_nan_equals_any_nan_and_zeros_differ_by_sign() -> None:
    quiet, other = np.array([0x7FC00000, 0], "uint32").view("float32"), np.array([0xFFC00001, 0], "uint32").view("float32")
    assert worker.count_differing(quiet, other) == 0
    assert worker.count_differing(np.array([0.0], "float32"), np.array([-0.0], "float32")) == 1
    assert worker.count_differing(quiet, np.zeros(2, "float32")) == 1


def test_memory_is_aligned_and_guarded() -> None:
    for size in (1, 7, 1000):
        memory = worker.Memory((size,), "float32")
        assert memory.array.ctypes.data % 64 == 0 and memory.intact()
        memory._raw[memory._end] ^= 1
        assert not memory.intact()


def test_special_values_are_few_and_the_same_in_each_process() -> None:
    memories = [worker.Memory((N,), "float32") for _ in range(2)]
    for memory in memories:
        worker.Bench().fill(memory, 0, special=True)
    assert worker.count_differing(memories[0].array, memories[1].array) == 0
    assert 3 <= (~np.isfinite(memories[0].array)).sum() <= 6


def test_arrays_of_equal_bytes_share_a_file_only_in_equal_shapes(tmp_path: Path) -> None:
    one, other, again = (stored(np.zeros(shape, np.float32), tmp_path) for shape in ((2, 3), (3, 2), (2, 3)))
    assert one == again and one[0] != other[0] and one[1] != other[1] and np.load(other[0]).shape == (3, 2)


def test_which_inputs_are_constant() -> None:
    runtime_residual = Epilogue((Step("add", ("%0", "$0")),), (Operand((4, 4), (1, 2)),))
    assert constant_inputs(Workload(Matmul(1, 4, 4, 4), runtime_residual)) == (False, True, False)
    assert constant_inputs(Workload(Matmul(1, 4, 4, 4, constant_b=False))) == (False, False)
    assert constant_inputs(Workload(Recurrent("lstm", 2, 1, 8))) == (False, True, True, False, False)
    assert constant_inputs(WORKLOAD) == (False, True)


def test_host_is_described_by_what_its_kernel_and_llvm_agree_on() -> None:
    here = host()
    assert here.vendor and here.l1 >= 8 << 10 and here.l3 >= here.l1
    assert here.key == host().key and "/" not in here.key
    assert set(required_features(TARGET)) <= set(here.features), "host_target must not use what the host lacks"


@pytest.mark.parametrize(
    ("target", "isa"),
    [
        ({"kind": "llvm", "mcpu": "znver4"}, AVX512),
        ({"kind": "llvm", "mcpu": "znver4", "mattr": ["-avx512f"]}, AVX2),
        ({"kind": "llvm", "mcpu": "haswell"}, AVX2),
        ({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"}, NEON),
    ],
)
def test_instruction_set_of_a_target(target: dict, isa: object) -> None:
    if "mtriple" not in target:
        target = {**target, "mtriple": "x86_64-linux-gnu"}
    assert isa_of(parse_target(target)) == isa


@pytest.mark.parametrize(
    ("target", "error", "says"),
    [
        ({"kind": "nollvm"}, UsageError, "not defined"),
        ({"kind": "llvm", "mcpu": "nosuch"}, UsageError, "doesn't know the CPU 'nosuch'"),
        ({"kind": "llvm", "mcpu": "native"}, UsageError, "'native'"),
        ({"kind": "llvm", "mtriple": "bogus", "mcpu": "znver4"}, UsageError, "triple 'bogus'"),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver4", "mattr": ["+nosuch"]}, UsageError, "'\\+nosuch'"),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver4", "mattr": ["avx2"]}, UsageError, "'avx2'"),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "nehalem"}, UnsupportedError, "lacks avx2, fma"),
        ({"kind": "llvm", "mtriple": "riscv64-linux-gnu", "mcpu": "sifive-u74"}, UnsupportedError, "riscv64"),
        ({"kind": "c"}, UnsupportedError, "'c'"),
    ],
)
def test_target_that_makes_no_sense_is_refused(target: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        parse_target(target)
