"""Is this machine fit to compile and to measure? Each check has a verdict and, where it isn't "ok", what to do."""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np

from . import compare
from .decide import verdict as rule
from .decide.log import Log
from .errors import TargetMismatch, TooNoisy, TvmfuseError, UnsupportedError, UsageError
from .linking import linker
from .measure.host import host, isa_among, llvm_only, toolchain
from .processors import default_threads

CPU_FOLDER = Path("/sys/devices/system/cpu")
NOISE_S = 1.0
BUSY_LOAD = 0.3  # runnable processes a processor, beside which times waver
# With apache-tvm-ffi 0.1.15 this kills the process: it can only be tried in another one.
FFI_TRIAL = "import tvm; tvm.ir.save_json(tvm.tirx.IntImm('int32', 1))"


@dataclass(frozen=True)
class Finding:
    """What one check found. fix: what to do unless all is well; exit_code: the command's, when this fails."""

    check: str
    verdict: Literal["ok", "warn", "fail"]
    found: str
    fix: str = ""
    exit_code: int = 0


def examine(logs: str | os.PathLike[str] | None = None, seconds: float = NOISE_S) -> list[Finding]:
    """Every check, in an order in which a later one means little when an earlier one fails.

    logs      as for `tvmfuse.build`. seconds: how long to measure how noisy the machine is.
    """
    checks: dict[str, Callable[[], Finding]] = {
        "toolchain": check_toolchain,
        "TVM's FFI": check_ffi,
        "CPU": check_cpu,
        "threads": check_threads,
        "thread binding": check_binding,
        "frequency": check_frequency,
        "load": check_load,
        "noise": lambda: check_noise(seconds),
        "C++ compiler": check_compiler,
        "tuning log": lambda: check_log(logs),
        "denormals": check_denormals,
    }
    return [_safely(name, check) for name, check in checks.items()]


def _safely(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except TvmfuseError as error:
        return Finding(name, "fail", error.command_line, "see above", error.exit_code)
    except Exception as error:  # whatever is broken here, the other checks still say something
        return Finding(name, "fail", f"{type(error).__name__}: {error}", "report this", 1)


def check_toolchain() -> Finding:
    here = toolchain()
    found = f"Python {sys.version.split()[0]}, " + ", ".join(f"{name} {version}" for name, version in here.items())
    pinned = next((r for r in importlib.metadata.requires("tvmfuse") or () if r.startswith("apache-tvm[")), "")
    wanted = re.search(r"==([\w.]+)", pinned)
    if wanted and importlib.metadata.version("apache-tvm") != wanted[1]:
        fix = f'pip install "apache-tvm[all]=={wanted[1]}"'
        return Finding("toolchain", "warn", f"{found}; tvmfuse is tested with apache-tvm {wanted[1]}", fix)
    return Finding("toolchain", "ok", found)


def check_ffi() -> Finding:
    """In a child process: a segmentation fault can't be caught."""
    tried = subprocess.run([sys.executable, "-c", FFI_TRIAL], capture_output=True, text=True, timeout=120, check=False)
    version = toolchain()["tvm_ffi"]
    if tried.returncode == 0:
        return Finding("TVM's FFI", "ok", f"tvm_ffi {version} writes IR as JSON")
    how = f"dies of signal {-tried.returncode}" if tried.returncode < 0 else (tried.stderr.strip().splitlines() or ["fails"])[-1]
    fix = 'pip install "apache-tvm-ffi>=0.1.14.post0,<0.1.15"'
    return Finding("TVM's FFI", "fail", f"tvm_ffi {version} {how} when it writes IR as JSON", fix, TargetMismatch.exit_code)


def check_cpu() -> Finding:
    here, masked = host(), llvm_only()
    isa = isa_among(here.features)
    found = f"{here.name or here.key}; {isa.name if isa else 'no fused multiply-add on vectors'}; {here.caches}"
    if isa is None:
        return Finding("CPU", "fail", found, "use a CPU with AVX2 and FMA, AVX-512 or NEON", UnsupportedError.exit_code)
    if masked:
        fix = "nothing, if a hypervisor hides them on purpose: they aren't used"
        return Finding("CPU", "warn", f"{found}; LLVM reports {', '.join(masked)}, the operating system doesn't", fix)
    return Finding("CPU", "ok", found)


def check_threads() -> Finding:
    all_, usable = os.cpu_count() or 1, default_threads()
    setting = os.environ.get("TVM_NUM_THREADS", "")
    found = f"{usable} of {all_} processors are this process's; TVM_NUM_THREADS={setting}"
    if setting.isdigit() and int(setting) < usable:
        return Finding("threads", "warn", found, "unset TVM_NUM_THREADS: TVM starts no more threads than it says")
    if usable < all_:
        return Finding("threads", "ok", f"{found} (affinity: taskset or a container)")
    return Finding("threads", "ok", found)


def check_binding() -> Finding:
    setting = os.environ.get("TVM_BIND_THREADS", "")
    if setting == "0":
        return Finding("thread binding", "ok", "TVM's threads are free to move (TVM_BIND_THREADS=0)")
    fix = "unset TVM_BIND_THREADS: beside bound workers the main thread roams, and about every second process is half as fast for life"
    return Finding("thread binding", "warn", f"TVM_BIND_THREADS={setting} binds TVM's workers to cores", fix)


def check_frequency() -> Finding:
    governors = sorted({path.read_text().strip() for path in CPU_FOLDER.glob("cpu*/cpufreq/scaling_governor")})
    boost = _boost()
    if not governors and boost is None:
        return Finding("frequency", "ok", "not visible here (a virtual machine, or not Linux)")
    found = f"governor {', '.join(governors) or 'unknown'}; turbo {'unknown' if boost is None else 'on' if boost else 'off'}"
    if governors and governors != ["performance"]:
        return Finding("frequency", "warn", found, "while measuring: sudo cpupower frequency-set -g performance")
    return Finding("frequency", "ok", found)


def _boost() -> bool | None:
    for path, on in ((CPU_FOLDER / "intel_pstate/no_turbo", "0"), (CPU_FOLDER / "cpufreq/boost", "1")):
        if path.exists():
            return path.read_text().strip() == on
    return None


def check_load() -> Finding:
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    found = f"{load:.2f} runnable processes in the last minute, on {processors} processors"
    if load > BUSY_LOAD * processors:
        return Finding("load", "warn", found, "stop what else runs here before you tune or compare")
    return Finding("load", "ok", found)


def check_noise(seconds: float, clock: Callable[[], float] = time.perf_counter) -> Finding:
    """The same work against itself: two copies, timed in turn, as candidates are."""
    x = np.ones(1 << 14, np.float32)
    out = np.empty_like(x)

    def work() -> None:
        np.multiply(x, x, out=out)

    times = compare.samples({"a": work, "b": work}, seconds, clock)
    ratios = [math.log(a / b) for a, b in zip(times["a"], times["b"], strict=True)]
    low, _, high = compare.quartiles(ratios)
    noise = abs(median(ratios))
    found = f"equal work differs by {noise:.2%} in the median; half of the pairs within {math.expm1(low):+.1%} .. {math.expm1(high):+.1%}"
    if noise > rule.MAX_NOISE:
        fix = "stop what else runs here; on a shared machine measure at another time"
        return Finding("noise", "fail", found, fix, TooNoisy.exit_code)
    if high - low > rule.MAX_NOISE:
        return Finding("noise", "warn", found, "verdicts will take longer, and small gains stay undecided: stop what else runs here")
    return Finding("noise", "ok", found)


def check_compiler() -> Finding:
    compiler, fix = linker(), "name another C++ compiler in CXX"
    with tempfile.TemporaryDirectory(prefix="tvmfuse-") as folder:
        source = Path(folder) / "empty.cc"
        source.write_text("int tvmfuse_doctor() { return 0; }\n")
        command = [compiler, "-shared", "-fPIC", "-o", f"{folder}/empty.so", str(source)]
        try:
            linked = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            return Finding("C++ compiler", "fail", f"{compiler} can't be run: {error.strerror}", fix, UsageError.exit_code)
    if linked.returncode:
        last = (linked.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("C++ compiler", "fail", f"{compiler} can't link a library: {last}", fix, UsageError.exit_code)
    return Finding("C++ compiler", "ok", f"{compiler} links libraries")


def check_log(logs: str | os.PathLike[str] | None) -> Finding:
    log = Log([logs]) if logs is not None else Log.shipped_and_own()
    counts, here = log.stats(), host().key
    own = sum(record.conditions.host.key == here for record in log.records())
    kinds = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(counts.items()) if count and name != "damaged")
    found = f"{kinds or 'no'} records, {own} of this CPU; written to {log.folders[-1]}"
    try:
        log.check_writable(host())
    except UsageError as error:
        return Finding("tuning log", "fail", f"{found}; {error}", "name a folder of your own with --logs", UsageError.exit_code)
    if log.damage:
        first = f"{len(log.damage)} damaged lines, the first at {log.damage[0]}"
        return Finding("tuning log", "warn", f"{found}; {first}", "`tvmfuse log compact` drops them; the records around them are used")
    return Finding("tuning log", "ok", found)


def check_denormals() -> Finding:
    smallest = np.full(16, 1e-40, np.float32)
    if (smallest * np.float32(1) != 0).all():
        return Finding("denormals", "ok", "kept: numbers below 1.2e-38 don't become zero")
    fix = "a library built with -ffast-math switched them off for the process: upgrade it, or load it after the models have run"
    return Finding("denormals", "warn", "flushed to zero in this process, so that outputs may differ in their last bits", fix)
