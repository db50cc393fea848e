"""ONNX's backend interface, and a sample of its own test suite. `make test-onnx` runs all of it."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from tests.exec import onnx_suite
from tvmfuse import onnx_backend
from tvmfuse.errors import UnsupportedError, UsageError

SAMPLES, EVERY = 6, 36  # tests in each of six samples: every 36th; a sixth of the suite in all
# What is refused, at least in some uses. An operator that isn't here has to work wherever the sample uses it.
REFUSED = frozenset(
    f"ai.onnx::{operator}"
    for operator in (
        "BatchNormalization Bernoulli Compress DeformConv Det Dropout EyeLike ImageDecoder LSTM MaxUnpool MelWeightMatrix "
        "NonMaxSuppression NonZero OptionalGetElement Pow RandomUniformLike Range Resize RoiAlign STFT Scan "
        "SplitToSequence TfIdfVectorizer TopK Unique"
    ).split()
)


@functools.cache
def cases() -> dict[str, Callable[[], object]]:
    return dict(sorted(onnx_suite.cases(["Node"]).items()))


@pytest.mark.parametrize("sample", range(SAMPLES))
def test_sample_of_the_suite(sample: int) -> None:
    names = list(cases())[sample * EVERY // SAMPLES :: EVERY]
    results = {name: onnx_suite.outcome(cases()[name]) for name in names}
    assert {name: why for name, (kind, why) in results.items() if kind == "failed"} == {}
    refused = {name: why for name, (kind, why) in results.items() if kind == "refused"}
    for name, why in refused.items():
        named = onnx_suite.operators(why)
        standard = {operator for operator in named if operator.startswith("ai.onnx::")}
        assert why.count("tensors of numbers") or standard <= REFUSED, f"{name}: {why}"
    assert len(names) - len(refused) >= 0.65 * len(names)


def model(text: str, opset: int = 17) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> g {text}')


def test_outputs_go_by_position_and_by_name() -> None:
    rep = onnx_backend.prepare(model("(float[2] x, float[2] w) => (float[2] y, float[2] z) { y = Add(x, w) z = Neg(x) }"), threads=1)
    x, w = np.array([1, 2], np.float32), np.array([3, 4], np.float32)
    for inputs in ([x, w], (x, w), {"w": w, "x": x}):
        outputs = rep.run(inputs)
        assert outputs[0].tolist() == [4, 6] and outputs["z"].tolist() == [-1, -2]
    with pytest.raises(UsageError, match="3 inputs are given, the model has x, w"):
        rep.run([x, w, w])


def test_what_shapes_depend_on_is_bound_at_each_call() -> None:
    """The target of a Reshape is computed from an input, and N is open."""
    text = "(float[N,4] x, int64[2] s) => (float[a,b] y) <int64[1] one = {1}> { t = Mul(s, one) y = Reshape(x, t) }"
    rep = onnx_backend.prepare(model(text), threads=1)
    for shape, target in (((2, 4), (4, 2)), ((2, 4), (8, 1)), ((3, 4), (4, 3))):
        x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        assert (rep.run([x, np.array(target)])[0] == x.reshape(target)).all()


def test_an_open_dimension_of_no_elements_is_refused() -> None:
    rep = onnx_backend.prepare(model("(float[N] x) => (float[N] y) { y = Relu(x) }"), threads=1)
    with pytest.raises(UnsupportedError, match=r"input 'x' has no elements: its shape is \(0,\)"):
        rep.run([np.empty(0, np.float32)])


def test_a_single_operator() -> None:
    node = onnx.helper.make_node("Clip", ["x", "low"], ["y"])
    x = np.array([-1, 2], np.float32)
    (y,) = onnx_backend.run_node(node, [x, np.float32(0)], opset_version=13, threads=1)
    assert y.tolist() == [0, 2]


def test_only_the_cpu_is_supported() -> None:
    assert onnx_backend.supports_device("CPU") and not onnx_backend.supports_device("CUDA") and not onnx_backend.supports_device("abacus")
    with pytest.raises(UnsupportedError, match="device 'CUDA' isn't supported"):
        onnx_backend.prepare(model("(float[2] x) => (float[2] y) { y = Relu(x) }"), "CUDA")


def test_compatible_is_what_can_be_compiled() -> None:
    assert onnx_backend.is_compatible(model("(float[2] x) => (float[2] y) { y = Relu(x) }"))
    assert not onnx_backend.is_compatible(model("(float[2] x) => (int64[1,n] y) { y = NonZero(x) }"))


class Child:
    """Passes its first test and dies in its second."""

    def __init__(self, command: list[str], **_: object) -> None:
        names = command[4:]
        SPAWNED.append(names)
        self.returncode = -11 if len(names) > 1 else 0
        self.stdout = [json.dumps(said).encode() for said in (names[0], ["passed", ""], *names[1:2])]

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        pass


SPAWNED: list[list[str]] = []


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    SPAWNED.clear()
    monkeypatch.setattr(subprocess, "Popen", Child)
    return SPAWNED


def test_a_process_that_dies_names_the_test(spawned: list[list[str]]) -> None:
    results = list(onnx_suite.run(["a", "b", "c"]))
    assert spawned == [["a", "b", "c"], ["c"]]
    assert results == [("a", "passed", ""), ("b", "failed", "the process ended with -11: "), ("c", "passed", "")]


def test_a_run_that_was_cut_short_goes_on(
    spawned: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onnx_suite, "cases", lambda *_: dict.fromkeys("abc"))
    path = tmp_path / "results.jsonl"
    path.write_text('["a", "refused", "why"]\n')
    assert onnx_suite.main([], path) == 1
    assert spawned == [["b", "c"]]
    assert [json.loads(line)[:2] for line in path.read_text().splitlines()] == [["a", "refused"], ["b", "passed"], ["c", "failed"]]
    assert "3 tests: {'passed': 1, 'refused': 1, 'failed': 1}" in capsys.readouterr().out
