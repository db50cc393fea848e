"""`tvmfuse doctor`: each check says what it found; what fails decides the exit code."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.invoking import Invoke
from tvmfuse import doctor, linking
from tvmfuse.doctor import Finding
from tvmfuse.errors import TargetMismatch, TooNoisy, UsageError


def test_this_machine_can_compile(tmp_path: Path) -> None:
    found = {finding.check: finding for finding in doctor.examine(tmp_path, seconds=0.05)}
    assert {found[check].verdict for check in ("toolchain", "TVM's FFI", "C++ compiler", "tuning log", "denormals")} == {"ok"}
    assert found["CPU"].verdict != "fail"
    assert all(finding.fix for finding in found.values() if finding.verdict != "ok")


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    found = [Finding("CPU", "ok", "a CPU"), Finding("load", "warn", "busy", "stop it")]
    monkeypatch.setattr(doctor, "examine", lambda logs: found)
    return found


def test_warnings_end_with_0(invoke: Invoke, findings: list[Finding]) -> None:
    code, out, err = invoke("doctor")
    assert code == 0 and "stop it" in out and err == "2 checks: 1 ok, 1 warn, 0 fail\n"


def test_the_first_failure_is_the_exit_code(invoke: Invoke, findings: list[Finding]) -> None:
    findings += [Finding("noise", "fail", "wild", "wait", 6), Finding("C++ compiler", "fail", "none", "install one", 7)]
    code, out, _ = invoke("doctor", "--json")
    assert code == 6 and [f["verdict"] for f in json.loads(out)] == ["ok", "warn", "fail", "fail"]


def test_a_check_that_breaks_does_not_hide_the_others() -> None:
    def broken() -> Finding:
        raise OSError("no such sensor")

    assert doctor._safely("frequency", broken) == Finding("frequency", "fail", "OSError: no such sensor", "report this", 1)


def test_an_ffi_that_kills_its_process_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "FFI_TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    found = doctor.check_ffi()
    assert (found.verdict, found.exit_code) == ("fail", TargetMismatch.exit_code)
    assert "dies of signal 11" in found.found and "<0.1.15" in found.fix


def test_a_cpu_without_fused_multiply_add_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "isa_among", lambda features: None)
    assert (doctor.check_cpu().verdict, doctor.check_cpu().exit_code) == ("fail", 4)


def test_masked_features_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "llvm_only", lambda: ["avx512f"])
    assert (doctor.check_cpu().verdict, "avx512f" in doctor.check_cpu().found) == ("warn", True)


def test_bound_and_too_few_threads_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "default_threads", lambda: 4)
    monkeypatch.setenv("TVM_BIND_THREADS", "1")
    monkeypatch.setenv("TVM_NUM_THREADS", "2")
    assert (doctor.check_threads().verdict, doctor.check_binding().verdict) == ("warn", "warn")
    monkeypatch.setenv("TVM_BIND_THREADS", "0")
    monkeypatch.setenv("TVM_NUM_THREADS", "4")
    assert (doctor.check_threads().verdict, doctor.check_binding().verdict) == ("ok", "ok")


def test_a_saving_governor_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "CPU_FOLDER", tmp_path)
    assert doctor.check_frequency() == Finding("frequency", "ok", "not visible here (a virtual machine, or not Linux)")
    for path, text in (("cpu0/cpufreq/scaling_governor", "powersave\n"), ("intel_pstate/no_turbo", "0\n")):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(text)
    assert (doctor.check_frequency().verdict, doctor.check_frequency().found) == ("warn", "governor powersave; turbo on")
    (tmp_path / "cpu0/cpufreq/scaling_governor").write_text("performance\n")
    assert doctor.check_frequency().verdict == "ok"


def test_a_busy_machine_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    for load, verdict in ((0.1, "ok"), (1.5, "warn")):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0, 0))
        assert doctor.check_load().verdict == verdict


@pytest.mark.parametrize(("swing", "verdict", "code"), [(0.0, "ok", 0), (0.2, "warn", 0), (0.5, "fail", TooNoisy.exit_code)])
def test_noise_is_judged_as_tuning_would(monkeypatch: pytest.MonkeyPatch, swing: float, verdict: str, code: int) -> None:
    """Half a swing to both sides spreads the quartiles; a whole one, always to the same side, moves the median."""
    sides = itertools.cycle((-1, 1)) if verdict == "warn" else itertools.repeat(1)
    ratios = [math.exp(next(sides) * swing / 2) for _ in range(20)]
    monkeypatch.setattr(doctor.compare, "samples", lambda *_: {"a": ratios, "b": [1.0] * 20})
    found = doctor.check_noise(0.1)
    assert (found.verdict, found.exit_code) == (verdict, code)


def compiler(monkeypatch: pytest.MonkeyPatch, name: str | None, done: Callable[..., object]) -> Finding:
    monkeypatch.setattr(linking.cc, "get_cc", lambda: name)
    monkeypatch.setattr(subprocess, "run", done)
    return doctor._safely("C++ compiler", doctor.check_compiler)


def test_an_absent_or_broken_compiler_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = compiler(monkeypatch, None, lambda *_, **__: None)
    assert (absent.verdict, absent.exit_code) == ("fail", UsageError.exit_code), "as where it is needed"
    assert "install one (Debian" in absent.found
    broken = compiler(monkeypatch, "g++", lambda *_, **__: SimpleNamespace(returncode=1, stderr="ld: no crt1.o"))
    assert (broken.verdict, broken.exit_code, "no crt1.o" in broken.found) == ("fail", UsageError.exit_code, True)

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    named = compiler(monkeypatch, "nowhere-g++", missing)
    assert (named.verdict, "CXX or CC names nowhere-g++" in named.found) == ("fail", True)
    unusable = compiler(monkeypatch, sys.executable, missing)
    assert (unusable.verdict, "can't be run" in unusable.found, "CXX" in unusable.fix) == ("fail", True, True)


def test_a_damaged_log_warns_and_an_unwritable_one_fails(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("garbage\n")
    assert (doctor.check_log(tmp_path).verdict, "1 damaged" in doctor.check_log(tmp_path).found) == ("warn", True)
    (tmp_path / "file").touch()
    found = doctor.check_log(tmp_path / "file" / "below")
    assert (found.verdict, found.exit_code) == ("fail", UsageError.exit_code)


def test_flushed_denormals_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "np", SimpleNamespace(full=lambda *_: np.zeros(16, np.float32), float32=float))
    assert doctor.check_denormals().verdict == "warn"
