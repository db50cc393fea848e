"""What goes wrong at the edges ends in one line and its exit code: models, shapes, arrays, targets, budgets, files to be written."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import external_data_helper, numpy_helper, parser

import tvmfuse
from tests.invoking import Invoke
from tvmfuse import linking
from tvmfuse.errors import ModelError, TvmfuseError, UnsupportedError, UsageError
from tvmfuse.model import safety
from tvmfuse.model.load import load

SOUND = "(float[2,3] x) => (float[2,3] y) { y = Relu(x) }"


def model(text: str = SOUND, opset: int = 17) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}, "com.example" : 1]> g {text}')


def written(folder: Path, proto: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def external(folder: Path, location: str, length: int = 12) -> Path:
    proto = model("(float[2,3] x, float[3] w) => (float[2,3] y) { y = Add(x, w) }")
    tensor = numpy_helper.from_array(np.ones(3, np.float32), "w")
    external_data_helper.set_external_data(tensor, location, offset=0, length=length)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    proto.graph.initializer.append(tensor)
    del proto.graph.input[1:]
    return written(folder, proto)


def hard_linked(folder: Path) -> Path:
    (folder / "secret").write_bytes(bytes(12))
    inner = folder / "inner"
    inner.mkdir()
    os.link(folder / "secret", inner / "w.bin")
    return external(inner, "w.bin")


def linked(folder: Path) -> Path:
    (folder / "secret").write_bytes(bytes(12))
    inner = folder / "inner"
    inner.mkdir()
    (inner / "w.bin").symlink_to(folder / "secret")
    return external(inner, "w.bin")


def short(folder: Path) -> Path:
    (folder / "w.bin").write_bytes(bytes(5))
    return external(folder, "w.bin")


def bytes_of(content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "model.onnx").write_bytes(content)
        return folder / "model.onnx"

    return make


def of(text: str, opset: int = 17) -> Callable[[Path], Path]:
    return lambda folder: written(folder, model(text, opset))


BAD: list[tuple[str, Callable[[Path], Path], int, str]] = [
    ("empty", bytes_of(b""), 3, "model.onnx is empty; copy or download it again"),
    ("truncated", bytes_of(model().SerializeToString()[:-9]), 3, "truncated, damaged or not ONNX"),
    ("text", bytes_of(b"Here is no model, only text.\n" * 9), 3, "truncated, damaged or not ONNX"),
    ("external data missing", lambda folder: external(folder, "w.bin"), 3, "weights of 'w' are missing"),
    ("external data short", short, 3, "w.bin has 5 bytes, but 'w' needs 12; copy it again"),
    ("external data absolute", lambda folder: external(folder, "/etc/hostname"), 3, "point outside the model's folder: '/etc/hostname'"),
    ("external data above", lambda folder: external(folder, "../w.bin"), 3, "point outside the model's folder: '../w.bin'"),
    ("external data behind a symbolic link", linked, 3, "point outside the model's folder: 'w.bin'"),
    ("external data behind a hard link", hard_linked, 3, "w.bin is a hard link: it may be a file of elsewhere"),
    ("unknown operator", of("(float[2] x) => (float[2] y) { y = Relux(x) }"), 3, "No Op registered for Relux"),
    ("custom domain", of("(float[2] x) => (float[2] y) { [a] y = com.example.Relu(x) }"), 4, "com.example::Relu: operators of domain"),
    ("no converter", of("(float[2,2] x) => (float y) { [a] y = Det(x) }"), 4, "ai.onnx::Det: no converter (nodes a)"),
    ("opset too new", of(SOUND, 99), 4, "uses ONNX operator set 99; 7 to"),
    ("opset too old", of(SOUND, 6), 4, "uses ONNX operator set 6; 7 to"),
    ("checker", of("(float[2] x) => (float[2] y) { y = Add(x, nowhere) }"), 3, "is not a valid ONNX model"),
    ("unbound dimension", of("(float[N,3] x) => (float[N,3] y) { y = Relu(x) }"), 3, 'Bind it with the extents you will run'),
    ("no elements", of("(float[0,3] x) => (float[0,3] y) { y = Relu(x) }"), 4, "output 'y' has no elements: its shape is (0, 3)"),
    ("2**62 elements", of("(float[4611686018427387904] x) => (float[a] y) { y = Relu(x) }"), 4, "'x' of shape (4611686018427387904,)"),
    ("2**62 constants", of("(float[2] x) => (float[a] y) <int64[1] n = {4611686018427387904}> { c = ConstantOfShape(n) y = Add(x, c) }"), 4,
     "'c' of shape (4611686018427387904,) has more"),
    ("2**62 copies", of("(float[2] x) => (float[a] y) <int64[1] n = {2305843009213693952}> { y = Tile(x, n) }"), 4,
     "'y' of shape (4611686018427387904,) has more"),
    ("text tensor", of("(string[2] x) => (string[2] y) { y = Identity(x) }"), 4, "input 'x' is a tensor of STRING"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "code", "said"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_model(invoke: Invoke, tmp_path: Path, make: Callable[[Path], Path], code: int, said: str) -> None:
    ended, _, err = invoke("explain", make(tmp_path))
    assert ended == code
    assert said in err and "Traceback" not in err and "internal error" not in err


def test_two_unnamed_dimensions_are_different_ones() -> None:
    proto = model("(float[a,b] x) => (float[c,d] y) { y = Relu(x) }")
    for dim in (*proto.graph.input[0].type.tensor_type.shape.dim, *proto.graph.output[0].type.tensor_type.shape.dim):
        dim.ClearField("dim_param")
    with pytest.raises(ModelError, match=r"leaves dimension 0 .* open; .* leaves dimension 1 .*shapes=\{\"x\": \(1, 1\)\}"):
        load(proto)
    assert load(proto, {"x": (2, 3)}).outputs[0].shape == (2, 3)


def test_what_exporters_write_for_a_dimension_without_a_name() -> None:
    """-1, and "?" for several that are different ones."""
    proto = model("(float[a,b,c] x) => (float[a,b,c] y) { y = Relu(x) }")
    for value in (proto.graph.input[0], proto.graph.output[0]):
        first, *others = value.type.tensor_type.shape.dim
        first.dim_value = -1
        for dim in others:
            dim.dim_param = "?"
    assert load(proto, {"x": (2, 3, 4)}).outputs[0].shape == (2, 3, 4)


def test_a_file_over_two_gigabytes_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.onnx"
    with path.open("wb") as file:
        file.truncate(3 << 30)  # sparse: it takes no space
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("it was read"))
    with pytest.raises(ModelError, match=r"large.onnx has 3221225472 bytes, more than .*external data"):
        safety.read(path)


def test_a_shape_too_large_takes_no_memory(tmp_path: Path) -> None:
    """2**31 elements are refused by a process that could not hold an eighth of them."""
    path = written(tmp_path, model("(int64[1] x) => (float[a] y) <int64[1] n = {2147483648}> { c = ConstantOfShape(n) y = Neg(c) }"))
    program = f"""
import resource, sys
from tvmfuse.errors import UnsupportedError
from tvmfuse.model.load import load
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load({str(path)!r})
except UnsupportedError as error:
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(error, grown < 1 << (28 if sys.platform == 'darwin' else 18))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith("elements True\n"), done


def test_nan_in_weights_compiles_and_warns() -> None:
    proto = model("(float[2,3] x, float[3] w) => (float[2,3] y) { y = Add(x, w) }")
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1, np.nan, 3], np.float32), "w"))
    del proto.graph.input[1:]
    with pytest.warns(UserWarning, match="NaN in the weights 'w'"):
        session = tvmfuse.build(proto, threads=1)
    (y,) = session.run(None, {"x": np.zeros((2, 3), np.float32)})
    assert (np.isnan(y) == [False, True, False]).all()


@pytest.fixture(scope="module")
def session() -> tvmfuse.Session:
    return tvmfuse.build(model(), threads=1)


X = np.arange(6, dtype=np.float32).reshape(2, 3) - 3


@pytest.mark.parametrize(
    ("feeds", "said"),
    [
        ({"z": X}, "no input named 'z'; the model has x"),
        ({}, "input 'x' of shape (2, 3) and dtype float32 is missing"),
        ({"x": X.T}, "'x' has shape (3, 2), expected (2, 3)"),
        ({"x": X.astype(np.float64)}, "'x' has dtype float64, expected float32"),
        ({"x": np.full((2, 3), "a")}, "'x' has dtype <U1, expected float32"),
        ({"x": [[0] * 3] * 2}, "'x' has dtype int64, expected float32"),
        (None, "inputs are given by name, as {'name': array, ...}, not as NoneType"),
        ([X], "inputs are given by name, as {'name': array, ...}, not as list"),
    ],
)
def test_wrong_feeds(session: tvmfuse.Session, feeds: Any, said: str) -> None:
    for call in (lambda: session.run(None, feeds), lambda: session.bind(feeds, {}), lambda: session.profile(feeds)):
        with pytest.raises(UsageError) as error:
            call()
        assert said in str(error.value) and error.value.exit_code == 2


def test_any_layout_of_the_right_numbers_is_taken(session: tvmfuse.Session) -> None:
    read_only = X.copy()
    read_only.flags.writeable = False
    for array in (np.asfortranarray(X), np.repeat(X, 2, axis=1)[:, ::2], X[::-1][::-1], X.astype(">f4"), read_only):
        assert (session.run(None, {"x": array})[0] == np.maximum(X, 0)).all()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"kind": "nosuch"}, "nosuch"),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "nosuch"}, "LLVM doesn't know the CPU 'nosuch'"),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "mattr": ["+nosuch"]}, "'+nosuch' is not"),
    ],
)
def test_an_unknown_target(target: dict, said: str) -> None:
    with pytest.raises(TvmfuseError) as error:
        tvmfuse.build(model(), target=target)
    assert said in str(error.value) and error.value.exit_code == 2


@pytest.mark.parametrize("budget", ["0", "soon", "-5s"])
def test_a_budget_that_makes_no_sense(invoke: Invoke, tmp_path: Path, budget: str) -> None:
    code, _, err = invoke("tune", written(tmp_path, model()), f"--budget={budget}")
    assert code == 2 and "write it like '90s', '10m' or '2h'" in err


def test_an_artifact_that_cannot_be_written(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = invoke("build", written(tmp_path, model()), "-o", tmp_path / "file" / "m.tvmfuse")
    assert code == 2 and "can't write" in err


@pytest.mark.parametrize(
    ("cxx", "said"),
    [
        ("nowhere-g++", "CXX or CC names nowhere-g++, which is not there to link with"),
        ("false", "false can't link a library for cortex-a76 aarch64-linux-gnu: "),
    ],
)
def test_a_linker_that_does_not_link_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cxx: str, said: str) -> None:
    foreign = tvmfuse.build(model(), target={"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"}, threads=1)
    monkeypatch.setenv("CXX", cxx)
    with pytest.raises(UsageError) as error:
        foreign.save(tmp_path / "m.tvmfuse")
    assert said in str(error.value) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(), OSError(errno.ENOSPC, "No space left on device")])
@pytest.mark.parametrize("suffix", ["so", "tar"])
def test_code_that_cannot_be_written_is_no_fault_of_the_compiler(
    session: tvmfuse.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, suffix: str
) -> None:
    class Unwritable:
        def export_library(self, path: str) -> None:
            raise error

    program = dataclasses.replace(session.program, module=Unwritable())
    with pytest.raises(UsageError, match=f"can't .*: .*{'No space left' if error.args else 'OSError'}") as raised:
        linking.link(program, tmp_path / f"model.{suffix}")
    assert "CXX" not in str(raised.value) and str(raised.value).startswith("can't write" if suffix == "tar" else linking.linker())


def test_tuning_without_a_linker_says_so_before_it_measures(invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "nowhere-g++")
    code, _, err = invoke("tune", written(tmp_path, model()), "--logs", tmp_path / "logs")
    assert code == 2 and "names nowhere-g++, which is not there" in err and not (tmp_path / "logs").exists()


def test_a_full_disk_leaves_nothing(session: tvmfuse.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(UsageError, match="can't write .*m.tvmfuse: No space left on device"):
        session.save(tmp_path / "m.tvmfuse")
    assert list(tmp_path.iterdir()) == []


def test_an_operator_whose_meaning_changed_later_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that newer operator sets left alone, or whose change is known, are taken."""
    from tvmfuse.model import operators

    proto = model(opset=25)
    proto.ir_version = 11
    assert load(proto).outputs[0].shape == (2, 3)
    monkeypatch.setattr(operators, "KNOWN_OPSET", 13)  # Relu is of 14
    with pytest.raises(UnsupportedError, match="Relu: its meaning since operator set 14 isn't known"):
        load(proto)
