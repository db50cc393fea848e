"""What a check records, that each kind of regression is noticed, and that noise is none."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvmfuse import check as checking
from tvmfuse.check import Decisions, SiteState, Speed, check, judge_speed, measure, regressions, slower
from tvmfuse.compare import digest
from tvmfuse.errors import UsageError

FUSED = SiteState(("add", "relu"), "register", 2)
RECORDED = Decisions({"conv1": FUSED}, 3, {"y": "a" * 64}, "some CPU", 1, Speed(2.0, (1.98, 2.02), 0.002))


def found(**changes: object) -> Decisions:
    return dataclasses.replace(RECORDED, **changes)  # type: ignore[arg-type]


def test_nothing_changed_is_no_difference() -> None:
    assert regressions(RECORDED, RECORDED) == checking.Judgement(())


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (found(sites={"conv1": SiteState(("add", "relu"), "separate", 0)}), "site conv1: no longer fused: add relu in register -> nothing"),
        (found(sites={"conv1": SiteState(("add", "relu"), "register", 1)}), "add in register, relu apart"),
        (found(sites={"conv1": SiteState((), None, 0)}), "no longer fused"),
        (found(sites={"conv1": SiteState(("add", "relu", "mul"), "register", 3)}), "other epilogue"),
        (found(sites={}), "site conv1: gone"),
        (found(kernels=4), "kernels: 3 -> 4"),
        (found(bits={"y": "b" * 64}), "bits of output y: aaaaaaaaaaaa -> bbbbbbbbbbbb"),
        (found(bits={}), "-> absent"),
        (found(bits={"y": "a" * 64, "z": "c" * 64}), "bits of output z: absent"),
    ],
)
def test_each_kind_of_regression_is_a_difference(changed: Decisions, said: str) -> None:
    judgement = regressions(RECORDED, changed)
    assert any(said in line for line in judgement.differences), judgement


@pytest.mark.parametrize(
    "changed",
    [
        found(sites={"conv1": SiteState(("add", "relu"), "tile", 2)}),
        found(sites={"conv1": FUSED, "conv2": FUSED}),
        found(kernels=2),
    ],
)
def test_what_is_no_worse_is_a_note(changed: Decisions) -> None:
    judgement = regressions(RECORDED, changed)
    assert judgement.differences == () and len(judgement.notes) == 1


def test_a_slowdown_needs_an_interval_beyond_tolerance_and_noise() -> None:
    recorded = Speed(2.0, (1.98, 2.02), 0.002)
    assert slower(recorded, Speed(2.6, (2.55, 2.65), 0.002), 0.1)
    assert slower(recorded, Speed(2.1, (2.08, 2.12), 0.002), 0.1) is None, "within the tolerance"
    assert slower(recorded, Speed(2.6, (2.1, 3.0), 0.002), 0.1) is None, "the interval reaches back"
    assert slower(recorded, Speed(2.6, (2.55, 2.65), 0.2), 0.1) is None, "the control is off by 20 %"
    assert slower(Speed(2.0, (1.98, 2.02), 0.2), Speed(2.6, (2.55, 2.65), 0.002), 0.1) is None, "it was recorded in noise"
    assert slower(recorded, Speed(1.0, (0.9, 1.1), 0.0), 0.0) is None, "faster"


def test_one_attempt_without_a_slowdown_is_enough() -> None:
    slow, well = Speed(3.0, (2.9, 3.1), 0.0), Speed(2.0, (1.9, 2.1), 0.0)
    attempts = iter([slow, slow, well])
    assert judge_speed(RECORDED, RECORDED, lambda: next(attempts), 0.1).differences == ()
    attempts = iter([slow, slow, slow])
    assert "slower: 1.50 times" in judge_speed(RECORDED, RECORDED, lambda: next(attempts), 0.1).differences[0]


def test_speed_is_judged_only_where_it_was_recorded() -> None:
    def never() -> Speed:
        raise AssertionError("measured")

    for here in (found(cpu="other"), found(threads=2)):
        assert "not compared" in judge_speed(RECORDED, here, never, 0.1).notes[0]
    assert "none is recorded" in judge_speed(found(speed=None), RECORDED, never, 0.1).notes[0]


class NoisyMachine:
    """A clock that calls advance: each takes its time, times what the machine does to everybody for a while, times jitter."""

    def __init__(self, seed: int, jitter: float) -> None:
        self.now, self.random, self.jitter, self.drift = 0.0, random.Random(seed), jitter, 1.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float):
        def call() -> None:
            if self.random.random() < 0.02:
                self.drift = self.random.uniform(1.0, 2.0)
            self.now += seconds * self.drift * (1 + abs(self.random.gauss(0, self.jitter)))

        return call


@pytest.mark.parametrize("jitter", [0.0, 0.02, 0.1, 0.5])
def test_a_noisy_machine_fails_nobody(jitter: float) -> None:
    failed = 0
    for seed in range(20):
        recorder = NoisyMachine(seed, 0.01)
        recorded = found(speed=measure(recorder.takes(2e-3), recorder.takes(5e-4), 1.0, recorder))
        machine = NoisyMachine(1000 + seed, jitter)
        judgement = judge_speed(recorded, RECORDED, lambda m=machine: measure(m.takes(2e-3), m.takes(5e-4), 1.0, m), 0.05)
        failed += bool(judgement.differences)
    assert failed == 0


def test_a_model_much_quicker_than_the_reference_is_judged_by_intervals_too() -> None:
    machine = NoisyMachine(3, 0.02)
    speed = measure(machine.takes(5e-5), machine.takes(5e-4), 1.0, machine)
    assert speed.interval[0] < speed.ratio < speed.interval[1]


def test_a_real_slowdown_shows_through_noise() -> None:
    for seed in range(10):
        recorder, machine = NoisyMachine(seed, 0.01), NoisyMachine(50 + seed, 0.02)
        recorded = found(speed=measure(recorder.takes(2e-3), recorder.takes(5e-4), 1.0, recorder))
        judgement = judge_speed(recorded, RECORDED, lambda m=machine: measure(m.takes(2.6e-3), m.takes(5e-4), 1.0, m), 0.1)
        assert judgement.differences, seed


def test_digest_takes_all_nan_for_one_and_signed_zeros_for_two() -> None:
    nan = np.array([0x7FC00000, 0xFFC12345], np.uint32).view(np.float32)
    assert digest(nan) == digest(np.array([np.nan, np.nan], np.float32))
    assert digest(np.array([0.0], np.float32)) != digest(np.array([-0.0], np.float32))
    assert digest(np.zeros((2, 1), np.float32)) != digest(np.zeros((1, 2), np.float32))
    assert digest(np.zeros(2, np.int32)) != digest(np.zeros(2, np.float32))


def model(path: Path, scale: float = 1.0, shared: bool = False) -> Path:
    """y = relu(x @ w + b); `shared` makes the product an output too, so that nothing can be fused to it."""
    rng = np.random.default_rng(1)
    constants = {"w": scale * rng.standard_normal((32, 16)), "b": rng.standard_normal(16)}
    ops = (("MatMul", ["x", "w"], "m"), ("Add", ["m", "b"], "a"), ("Relu", ["a"], "y"))
    nodes = [helper.make_node(op, reads, [out], name=out) for op, reads, out in ops]
    x, y, m = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [24, extent]) for n, extent in (("x", 32), ("y", 16), ("m", 16)))
    initializers = [numpy_helper.from_array(v.astype(np.float32), n) for n, v in constants.items()]
    graph = helper.make_graph(nodes, "g", [x], [y, m] if shared else [y], initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


def test_a_model_is_checked_against_its_file(tmp_path: Path) -> None:
    file = tmp_path / "decisions.json"
    first = model(tmp_path / "a.onnx")
    assert check(first, file, threads=1, fuse="always", write=True, speed=False).differences == ()
    assert list(tmp_path.glob(".*")) == [], "no partial file stays"
    assert check(first, file, threads=1, fuse="always", speed=False) == checking.Judgement(())
    apart = check(first, file, threads=1, fuse="never", speed=False).differences
    assert any("no longer fused: add relu" in line for line in apart) and any(line.startswith("kernels: 1 -> 2") for line in apart)
    assert not any("bits" in line for line in apart), "the bits are the same whatever is decided"
    (bits,) = check(model(tmp_path / "b.onnx", scale=2), file, threads=1, fuse="always", speed=False).differences
    assert bits.startswith("bits of output y")
    assert any("no longer fused" in d for d in check(model(tmp_path / "c.onnx", shared=True), file, fuse="always", speed=False).differences)


def test_speed_is_recorded_beside_the_reference_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "ATTEMPT_S", 0.05)
    file = tmp_path / "decisions.json"
    check(model(tmp_path / "a.onnx"), file, threads=1, write=True)
    data = json.loads(file.read_text())
    assert data["speed"]["ratio"] > 0
    data["speed"].update(ratio=1e-9, interval=[1e-9, 1e-9], noise=0)
    file.write_text(json.dumps(data))
    monkeypatch.setattr(checking, "MAX_NOISE", 1e9)
    monkeypatch.setattr(checking, "MARGIN_PER_NOISE", 0.0)
    (said,) = check(model(tmp_path / "a.onnx"), file, threads=1).differences
    assert said.startswith("slower")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 9}', '{"format": 1, "sites": 3, "speed": null}'])
def test_a_file_that_holds_no_decisions(tmp_path: Path, text: str) -> None:
    file = tmp_path / "decisions.json"
    with pytest.raises(UsageError, match="write=True"):
        check("absent.onnx", file)
    file.write_text(text)
    with pytest.raises(UsageError, match="holds no decisions"):
        check("absent.onnx", file)


def test_the_fixture_fails_a_test_with_the_differences(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it(tvmfuse_check):\n    tvmfuse_check('m.onnx', 'd.json', threads=1, fuse='always')\n")
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(Path(__file__).parents[2])}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tvmfuse.pytest_plugin",
            "-p",
            "no:cacheprovider",
            "--tvmfuse-no-speed",
            *options,
        ]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    model(tmp_path / "m.onnx")
    written = run("--tvmfuse-write")
    assert written.returncode == 0, written.stdout
    model(tmp_path / "m.onnx", scale=2)
    failed = run()
    assert failed.returncode == 1 and "bits of output y" in failed.stdout
