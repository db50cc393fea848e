"""Building for a CPU that isn't here, from what the log's records say of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnx
import pytest

import tvmfuse
from tests import small_models
from tvmfuse import building, kernel
from tvmfuse.choose import Chooser
from tvmfuse.decide.log import Log, Record
from tvmfuse.errors import UnsupportedError, UsageError
from tvmfuse.measure.host import host, isa_of, machine, parse_target, recorded_target, target_features, toolchain
from tvmfuse.values import NEON, Candidate, Host, Verdict

PI = Host("ARM", 8, 0xD08, 3, ("crc", "fp-armv8", "neon"), 32 << 10, 1 << 20, 1 << 20, "cortex-a72")
SERVER = Host("ARM", 8, 0xD0C, 0, (*PI.features, "dotprod"), 64 << 10, 1 << 20, 32 << 20, "no name that LLVM knows")


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return small_models.one_layer()


def won(model: onnx.ModelProto, there: Host, threads: int) -> tuple[Record, Candidate]:
    """That a candidate other than the default has won on a host, and the candidate."""
    (site,) = building.prepare(model).sites
    measured = machine(recorded_target(there), threads, there)
    winner = next(c for c in kernel.candidates(site.workload, measured) if c.placement == "tile")
    verdict = Verdict("wins", winner, 0.9, (0.88, 0.93), 0.001, 15, "for this test")
    conditions = Chooser("measured", measured, host=there, toolchain=toolchain()).conditions(site.workload)
    return Record.of(site.workload, verdict, conditions), winner


@pytest.fixture
def logs(model: onnx.ModelProto, tmp_path: Path) -> Path:
    Log([tmp_path]).append(won(model, PI, 4)[0], won(model, SERVER, 2)[0])
    return tmp_path


@pytest.mark.parametrize(("there", "threads"), [(PI, 4), (SERVER, 2)])
def test_build_takes_what_was_measured_there(model: onnx.ModelProto, logs: Path, there: Host, threads: int) -> None:
    session = tvmfuse.build(model, logs=logs, host=there.key)
    (site,) = session.sites
    assert (site.source, site.placement, site.ci) == ("measured", "tile", (0.88, 0.93))
    assert session.manifest.threads == threads, "what was measured there, not what this machine has"
    assert "aarch64" in session.manifest.target and ("cortex-a72" in session.manifest.target) == (there is PI)
    assert set(session.manifest.features) <= set(there.features)


def test_target_says_how_the_compiler_is_to_know_that_cpu(model: onnx.ModelProto, logs: Path) -> None:
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"}
    session = tvmfuse.build(model, target=target, logs=logs, host=SERVER.key)
    assert "cortex-a76" in session.manifest.target and session.sites[0].source == "measured"


def test_target_with_what_that_cpu_lacks_is_refused(model: onnx.ModelProto, logs: Path) -> None:
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "neoverse-v1"}
    with pytest.raises(UsageError, match=f"the target has sve, which host {PI.key} .cortex-a72. lacks"):
        tvmfuse.build(model, target=target, logs=logs, host=PI.key)


def test_unknown_host_is_told_with_those_that_there_are(model: onnx.ModelProto, logs: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"no records of a host 'pi4'; hosts that it has: .*{PI.key} \(cortex-a72\)"):
        tvmfuse.build(model, logs=logs, host="pi4")
    with pytest.raises(UsageError, match="hosts that it has: none"):
        tvmfuse.build(model, logs=tmp_path / "empty", fuse="never", host=PI.key)


def test_newest_description_of_a_host_holds_with_the_threads_of_all(model: onnx.ModelProto, logs: Path) -> None:
    renamed = dataclasses.replace(PI, name="cortex-a76", l3=2 << 20)
    Log([logs]).append(won(model, renamed, 1)[0])
    device = building.recorded_device(Log([logs]), PI.key)
    assert (device.host, device.processors) == (renamed, 4)


def test_host_and_device_do_not_go_together(model: onnx.ModelProto, logs: Path) -> None:
    device = building.recorded_device(Log([logs]), PI.key)
    with pytest.raises(UsageError, match="a host of the log and a device over RPC"):
        building.plan_for(None, None, "always", logs, device=device, host_key=PI.key)


def test_target_alone_takes_no_records_of_a_host_that_nobody_named(model: onnx.ModelProto, logs: Path) -> None:
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"}
    assert tvmfuse.build(model, target=target, threads=4, logs=logs).sites[0].source == "default"


def test_other_cpu_of_this_kind_gives_the_same_bits(model: onnx.ModelProto, tmp_path: Path) -> None:
    there = dataclasses.replace(host(), vendor="Other", name="its brand")
    Log([tmp_path]).append(won(model, there, 1)[0])
    session = tvmfuse.build(model, logs=tmp_path, host=there.key)
    assert session.sites[0].source == "measured" and session.manifest.target != tvmfuse.build(model, threads=1).manifest.target
    session.save(tmp_path / "m.tvmfuse")
    x = np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32)
    loaded, here = tvmfuse.load(tmp_path / "m.tvmfuse"), tvmfuse.build(model, threads=1, fuse="never")
    assert loaded.run(None, {"x": x})[0].tobytes() == here.run(None, {"x": x})[0].tobytes()


def test_features_that_another_llvm_has_named_are_left_out() -> None:
    target = recorded_target(dataclasses.replace(PI, features=("fp-armv8", "neon", "named-elsewhere")))
    assert parse_target(target) is target and isa_of(target) == NEON


def test_recorded_cpu_has_its_features_and_no_more() -> None:
    masked = recorded_target(dataclasses.replace(PI, features=("fp-armv8", "neon", "dotprod")))
    assert isa_of(masked) == NEON and {"neon", "dotprod"} <= target_features(masked)
    assert "sve" not in target_features(recorded_target(dataclasses.replace(PI, name="neoverse-v1")))
    with pytest.raises(UnsupportedError, match="cortex-a72 has no instruction set of ours"):
        recorded_target(dataclasses.replace(PI, features=("crc",)))
