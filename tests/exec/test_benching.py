"""Runtimes at work in processes of their own, and what a crash of one leaves of a run."""

from __future__ import annotations

import math
import multiprocessing.context
import os
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import pytest
from onnx import TensorProto, helper, numpy_helper

from tvmfuse import benching, compare, peers
from tvmfuse.benching import Entry
from tvmfuse.errors import DeviceError
from tvmfuse.peers.double import double
from tvmfuse.peers.process import Process


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benching.platformdirs, "user_cache_path", lambda _: tmp_path / "cache")


def model() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """y = relu(x @ w) with x (n, 16), n free."""
    w = np.random.default_rng(1).standard_normal((16, 8)).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"]), helper.make_node("Relu", ["m"], ["y"])]
    inputs, outputs = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", extent]) for name, extent in (("x", 16), ("y", 8)))
    graph = helper.make_graph(nodes, "g", [inputs], [outputs], [numpy_helper.from_array(w, "w")])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return made, {"x": np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)}


def test_rows_of_what_runs_and_reasons_of_what_does_not() -> None:
    proto, feeds = model()
    entries = [
        *benching.ours("ours", 1, fuse="always"),
        Entry("onnxruntime", "onnxruntime"),
        Entry("gone", "openvino", reason="not installed"),
        Entry("unable", "tract", threads=2),
    ]
    rows = benching.bench("m", proto, feeds, entries, 0.1, callers=2)
    assert [row.runner for row in rows] == ["ours", "ours (A/A)", "onnxruntime", "gone", "unable"]
    for row in rows[:3]:
        assert row.reason is None and row.error is not None and row.error < 1e-6
        assert len(row.samples_s) >= 1 and row.median_s is not None and row.median_s > 0
        assert row.percentiles_s is not None and row.percentiles_s["min"] <= row.percentiles_s["p99"]
    assert rows[0].bits and rows[0].bits == rows[1].bits
    assert len(rows[0].samples_s) >= compare.MIN_ROUNDS
    assert rows[0].calls_per_s and rows[2].calls_per_s is None
    assert rows[3].reason == "not installed"
    assert rows[4].reason and "tract" in rows[4].reason or "one thread" in str(rows[4].reason)


def test_an_interrupt_while_a_process_starts_is_for_its_parent(tmp_path: Path) -> None:
    proto, feeds = model()
    onnx.save(proto, tmp_path / "m.onnx")
    with Process("onnxruntime", str(tmp_path / "m.onnx"), feeds, ("y",)) as process:
        for _ in range(40):
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.01)
        process.load()


def test_a_process_that_dies_says_of_what() -> None:
    proto, feeds = model()
    with Process("onnxruntime", "nowhere.onnx", feeds, ("y",)) as process:
        with pytest.raises(DeviceError, match="nowhere.onnx"):
            process.load()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match="SIGKILL"):
            process.load()


def test_a_process_interrupted_while_it_starts_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def start(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", start)
    with pytest.raises(KeyboardInterrupt), Process("onnxruntime", "m.onnx", {}, ()):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_runner_that_fails_while_timed_leaves_the_others() -> None:
    class Fake:
        def __init__(self, lasts: int) -> None:
            self.lasts = lasts

        def time(self, repeats: int, warm: bool) -> list[float]:
            self.lasts -= 1
            if self.lasts < 0:
                raise DeviceError("it died")
            return [1e-3] * repeats

    good, bad = Entry("good", "tvmfuse"), Entry("bad", "mnn")
    rows = {entry: compare.Row("m", entry.name, 1) for entry in (good, bad)}
    times = benching._times(rows, {good: Fake(1000), bad: Fake(4)}, 0)  # type: ignore[dict-item]
    assert list(times) == [good] and len(times[good].samples) == compare.MIN_ROUNDS
    assert rows[bad].reason == "it died" and rows[good].reason is None


def test_the_float64_run_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    proto, feeds = model()
    path = str(tmp_path / "m.onnx")
    onnx.save(benching.static(proto, feeds), path)
    exact = benching.float64(path, feeds, ("y",), print)
    assert exact is not None and exact["y"].dtype == np.float64
    w = numpy_helper.to_array(proto.graph.initializer[0]).astype(np.float64)
    np.testing.assert_allclose(exact["y"], np.maximum(feeds["x"].astype(np.float64) @ w, 0), rtol=1e-13)
    monkeypatch.setattr(benching, "Process", None)  # a second computation would fail
    again = benching.float64(path, feeds, ("y",), print)
    assert again is not None and (again["y"] == exact["y"]).all()


def test_static_binds_free_dimensions_and_leaves_the_caller_s_model() -> None:
    proto, feeds = model()
    bound = benching.static(proto, feeds)
    assert [d.dim_value for d in bound.graph.input[0].type.tensor_type.shape.dim] == [4, 16]
    assert [d.dim_value for d in bound.graph.output[0].type.tensor_type.shape.dim] == [4, 8]
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"


@pytest.mark.parametrize("size", [2, 3, 5])
def test_lrn_in_float64_is_what_onnx_defines(size: int) -> None:
    node = helper.make_node("LRN", ["x"], ["y"], size=size, alpha=0.5, beta=0.6, bias=1.5)
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 7, 2, 2]) for name in "xy"]
    proto = helper.make_model(helper.make_graph([node], "g", values[:1], values[1:]), opset_imports=[helper.make_opsetid("", 13)])
    x = np.random.default_rng(0).standard_normal((1, 7, 2, 2))
    (got,) = onnx.reference.ReferenceEvaluator(double(proto)).run(None, {"x": x})
    expected = np.empty_like(x)
    for c in range(7):
        window = x[:, max(0, c - math.floor((size - 1) / 2)) : c + math.ceil((size - 1) / 2) + 1]
        expected[:, c] = x[:, c] / (1.5 + 0.5 / size * (window**2).sum(1)) ** 0.6
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_only_those_who_say_so_are_tuned_for_hours() -> None:
    (tuned,) = benching.others(["tvm_tuned"], 2)
    assert "tvm_tuned" not in peers.USUAL and tuned.patience_s > 3600
    assert {entry.patience_s for entry in benching.others(peers.USUAL, 2)} == {peers.ANSWER_TIMEOUT_S}


def test_what_takes_too_long_is_given_up() -> None:
    _, feeds = model()
    with Process("tvmfuse", "m.onnx", feeds, ("y",)) as process:
        with pytest.raises(DeviceError, match="no answer within 0 s"):
            process.load(0.01)
