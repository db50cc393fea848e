"""A session as its caller sees it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import psutil
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvmfuse
from tvmfuse import artifact
from tvmfuse.artifact import _digest
from tvmfuse.errors import ModelError, TargetMismatch, UsageError
from tvmfuse.values import Cost, Level, Roofline


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    """relu(x @ w + b) reshaped before its bias, so that there is something to cross."""
    rng = np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal((8, 20), np.float32), "w"),
        onnx.numpy_helper.from_array(np.array([3, 4, 5], np.int64), "shape"),
        onnx.numpy_helper.from_array(rng.standard_normal(5, np.float32), "b"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["product"]),
        helper.make_node("Reshape", ["product", "shape"], ["split"]),
        helper.make_node("Add", ["split", "b"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 4, 5])
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights), opset_imports=[helper.make_opsetid("", 17)])


@pytest.fixture(scope="module")
def session(model: onnx.ModelProto) -> tvmfuse.Session:
    return tvmfuse.build(model, threads=1, fuse="always")


@pytest.fixture(scope="module")
def wide() -> tvmfuse.Session:
    """A model that is worth two threads."""
    w = onnx.numpy_helper.from_array(np.random.default_rng(0).standard_normal((256, 256), np.float32), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [256, 256]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [x], [y], [w])
    return tvmfuse.build(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), threads=2)


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((3, 8), np.float32)


def expected(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    w, _, b = (onnx.numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer)
    return np.maximum((x @ w).reshape(3, 4, 5) + b, 0)


def test_site_says_what_was_crossed(session: tvmfuse.Session) -> None:
    (site,) = session.sites
    assert (site.epilogue, site.placement, site.cut, site.source) == (("add", "relu"), "register", 2, "forced")
    assert site.crossed == ("reshape (3,20)->(3,4,5)",)
    assert session.kernel_count == 1


def test_run_takes_arrays_of_any_kind(session: tvmfuse.Session, model: onnx.ModelProto, x: np.ndarray) -> None:
    read_only = x.copy()
    read_only.flags.writeable = False
    unaligned = np.empty(25, np.float32)[1:].reshape(3, 8)
    unaligned[...] = x
    for array in (x, read_only, unaligned, np.asfortranarray(x), x.astype(">f4"), np.repeat(x, 2, axis=1)[:, ::2]):
        (y,) = session.run(None, {"x": array})
        np.testing.assert_allclose(y, expected(model, x), rtol=0, atol=1e-5)


def test_bound_buffers_are_read_and_written_in_place(session: tvmfuse.Session, model: onnx.ModelProto, x: np.ndarray) -> None:
    source, target = np.zeros_like(x), np.zeros((3, 4, 5), np.float32)
    call = session.bind({"x": source}, {"y": target})
    source[...] = x
    call()
    np.testing.assert_allclose(target, expected(model, x), rtol=0, atol=1e-5)


def test_results_outlive_the_next_call(session: tvmfuse.Session, x: np.ndarray) -> None:
    (first,) = session.run(None, {"x": x})
    kept = first.copy()
    session.run(None, {"x": -x})
    assert (first == kept).all()


@pytest.mark.parametrize(
    ("feeds", "said"),
    [
        ({}, "input 'x' of shape (3, 8) and dtype float32 is missing"),
        ({"z": np.zeros((3, 8), np.float32)}, "no input named 'z'; the model has x"),
        ({"x": np.zeros((3, 9), np.float32)}, "'x' has shape (3, 9), expected (3, 8)"),
        ({"x": np.zeros((3, 8))}, "'x' has dtype float64, expected float32"),
    ],
)
def test_wrong_feeds_are_named(session: tvmfuse.Session, feeds: dict[str, np.ndarray], said: str) -> None:
    with pytest.raises(UsageError) as error:
        session.run(None, feeds)
    assert said in str(error.value)


def test_tensors_of_rank_0_run() -> None:
    scalar = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float x) => (float y) { y = Relu(x) }')
    (y,) = tvmfuse.build(scalar, threads=1).run(None, {"x": np.array(2.5, np.float32)})
    assert y.shape == () and y == 2.5


def test_unknown_names_are_refused_by_bind_too(session: tvmfuse.Session, x: np.ndarray) -> None:
    with pytest.raises(UsageError, match="no input named 'z'"):
        session.bind({"x": x, "z": x}, {})
    with pytest.raises(UsageError, match="no output named 'q'"):
        session.bind({"x": x}, {"q": x})


def test_output_that_overlaps_an_input_is_refused_by_bind(session: tvmfuse.Session) -> None:
    shared = np.zeros(84, np.float32)
    x, y, overlapping = shared[:24].reshape(3, 8), shared[24:].reshape(3, 4, 5), shared[23:83].reshape(3, 4, 5)
    with pytest.raises(UsageError, match="output 'y' can't be bound: its buffer overlaps that of 'x'"):
        session.bind({"x": x}, {"y": overlapping})
    session.bind({"x": x}, {"y": y})()


def test_unknown_output_is_named(session: tvmfuse.Session, x: np.ndarray) -> None:
    with pytest.raises(UsageError, match="no output named 'q'; the model has y"):
        session.run(["q"], {"x": x})


def test_trace_lists_the_kernels_of_the_sites(session: tvmfuse.Session, x: np.ndarray) -> None:
    ((kernel, seconds),) = session.trace({"x": x})[0]
    assert (kernel,) == session.manifest.kernels[session.sites[0].name]
    assert seconds > 0


def test_saved_and_loaded_gives_the_same_bits(session: tvmfuse.Session, x: np.ndarray, tmp_path: Path) -> None:
    session.save(tmp_path / "m.tvmfuse")
    loaded = tvmfuse.load(tmp_path / "m.tvmfuse")
    assert loaded.run(None, {"x": x})[0].tobytes() == session.run(None, {"x": x})[0].tobytes()
    assert loaded.sites == session.sites
    assert loaded.manifest == session.manifest
    assert [name for name, _ in loaded.trace({"x": x})[0]] == [name for name, _ in session.trace({"x": x})[0]]
    assert [path.name for path in tmp_path.iterdir()] == ["m.tvmfuse"]


def altered(source: Path, target: Path, signed: bool = True, **fields: object) -> Path:
    """A copy of an artifact with other fields in its manifest."""
    with zipfile.ZipFile(source) as archive, zipfile.ZipFile(target, "w") as copy:
        parts = {name: archive.read(name) for name in archive.namelist()}
        manifest = {**json.loads(parts["manifest.json"]), **fields}
        if signed:
            del manifest["sha256"]
            manifest["sha256"] = _digest(manifest, parts["model.so"], [parts["weights.bin"]])
        copy.writestr("manifest.json", json.dumps(manifest))
        copy.writestr("model.so", parts["model.so"])
        weights = zipfile.ZipInfo("weights.bin")
        at = -(copy.start_dir + 30 + len("weights.bin") + 4) % 64
        weights.extra = b"\x35\xd9" + at.to_bytes(2, "little") + bytes(at)
        copy.writestr(weights, parts["weights.bin"])
    return target


def test_artifact_is_checked_before_it_is_loaded(session: tvmfuse.Session, tmp_path: Path) -> None:
    saved = tmp_path / "m.tvmfuse"
    session.save(saved)
    with pytest.raises(ModelError, match="there is no file"):
        tvmfuse.load(tmp_path / "absent.tvmfuse")
    (tmp_path / "short.tvmfuse").write_bytes(saved.read_bytes()[:1000])
    with pytest.raises(ModelError, match="not a whole tvmfuse artifact"):
        tvmfuse.load(tmp_path / "short.tvmfuse")
    with pytest.raises(ModelError, match="is damaged"):
        tvmfuse.load(altered(saved, tmp_path / "a", signed=False, sha256="0" * 64))
    with pytest.raises(ModelError, match="is damaged"):
        tvmfuse.load(altered(saved, tmp_path / "a", signed=False, features=[]))
    with pytest.raises(TargetMismatch, match="built for a CPU with avx1024"):
        tvmfuse.load(altered(saved, tmp_path / "b", features=["avx1024"]))
    with pytest.raises(TargetMismatch, match="built with tvm 0.1"):
        tvmfuse.load(altered(saved, tmp_path / "c", toolchain={"tvm": "0.1", "tvm_ffi": "0"}))
    with pytest.raises(TargetMismatch, match="artifact format 99"):
        tvmfuse.load(altered(saved, tmp_path / "d", format=99))


def test_a_loaded_session_is_saved_as_the_same_file(session: tvmfuse.Session, tmp_path: Path) -> None:
    session.save(tmp_path / "m.tvmfuse")
    tvmfuse.load(tmp_path / "m.tvmfuse").save(tmp_path / "n.tvmfuse")
    assert (tmp_path / "m.tvmfuse").read_bytes() == (tmp_path / "n.tvmfuse").read_bytes()


def test_weights_are_mapped_where_they_lie_in_the_file(session: tvmfuse.Session, tmp_path: Path) -> None:
    session.save(tmp_path / "m.tvmfuse")
    program = artifact.load(tmp_path / "m.tvmfuse")
    assert program.file is not None
    begin = np.frombuffer(program.file, np.uint8).ctypes.data
    for mapped, held in zip(program.weights, session.program.weights, strict=True):
        assert mapped.ctypes.data % 64 == 0
        assert 0 <= mapped.ctypes.data - begin < len(program.file)
        assert mapped.tobytes() == held.tobytes()


def test_weights_that_changed_in_the_file_are_noticed(session: tvmfuse.Session, tmp_path: Path) -> None:
    session.save(tmp_path / "m.tvmfuse")
    content = (tmp_path / "m.tvmfuse").read_bytes()
    weight = session.program.weights[0].tobytes()
    assert content.count(weight) == 1
    (tmp_path / "m.tvmfuse").write_bytes(content.replace(weight, bytes(len(weight))))
    with pytest.raises(ModelError, match="is damaged"):
        tvmfuse.load(tmp_path / "m.tvmfuse")


def test_save_to_an_unwritable_place_leaves_nothing(session: tvmfuse.Session, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't write"):
        session.save(tmp_path / "no" / "such" / "folder.tvmfuse")
    assert not list(tmp_path.iterdir())


def test_profile_says_what_each_kernel_costs_and_could_cost():
    """A matmul of 64 x 32 x 16 with a constant B: its flop, its bytes, and the roofline's bound of them."""
    limits = Roofline(1e9, (Level("L1", 1 << 20, 1e6), Level("DRAM", float("inf"), 1e5)))
    weights = np.ones((16, 32), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (64, 16))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (64, 32))],
        [numpy_helper.from_array(weights, "w")],
    )
    session = tvmfuse.build(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), threads=1)
    (only,) = session.profile({"x": np.ones((64, 16), np.float32)}, repeats=2, roofline=limits)
    assert only.sites == (session.sites[0].name,) and only.launches == 1 and only.time_s > 0
    assert only.cost == Cost(2 * 64 * 32 * 16, 4 * 64 * (16 + 32), 4 * 16 * 32)
    assert only.bound_s == pytest.approx(4 * (64 * 48 + 16 * 32) / 1e6)


def test_a_forked_child_runs_parallel_loops(wide: tvmfuse.Session, tmp_path: Path) -> None:
    """TVM's workers aren't there in the child: without a thread of its own its call would wait for them for ever."""
    wide.save(tmp_path / "m.tvmfuse")
    code = """
import os, sys, threading, numpy as np, tvmfuse
session, feeds = tvmfuse.load(sys.argv[1]), {"x": np.ones((256, 256), np.float32)}
(before,) = session.run(None, feeds)
child = os.fork()
if not child:
    os._exit(int((session.run(None, feeds)[0] != before).any()))
sys.exit(os.waitpid(child, 0)[1])
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "m.tvmfuse")], check=True, timeout=60)


def test_many_short_lived_callers_leave_no_threads_behind(wide: tvmfuse.Session) -> None:
    """TVM makes a pool of workers for each thread that starts a parallel loop, and never ends it."""
    feeds = {"x": np.random.default_rng(2).standard_normal((256, 256), np.float32)}
    (expected,) = wide.run(None, feeds)
    bound_to = np.empty_like(expected)
    bound = wide.bind(feeds, {"y": bound_to})
    wrong: list[int] = []

    def call(number: int) -> None:
        if number % 2:
            (y,) = wide.run(None, feeds)
        else:
            bound()
            y = bound_to
        if (y != expected).any():
            wrong.append(number)

    counts = []
    for start in range(0, 200, 10):
        threads = [threading.Thread(target=call, args=(start + i,)) for i in range(10)]
        for thread in threads[::2]:  # bound: one at a time
            thread.start()
            thread.join()
        for thread in threads[1::2]:
            thread.start()
        for thread in threads[1::2]:
            thread.join()
        counts.append(psutil.Process().num_threads())
    assert not wrong
    assert counts[-1] <= counts[0] + 1, counts  # a thread that has been joined may still be ending
