"""The cache of compiled models: found again, shared, damaged, full, read-only, bounded."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import tvmfuse
from tvmfuse import artifact, building, cache
from tvmfuse.errors import UsageError

SOURCE = (
    '<ir_version: 8, opset_import: ["": 17]> g (float[2,3] x) => (float[2,4] y) <float[3,4] w = {1,2,3,4,5,6,7,8,9,10,11,12}>'
    "{ h = MatMul(x, w) y = Relu(h) }"
)
X = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def model() -> onnx.ModelProto:
    return parsed(SOURCE)


def parsed(source: str) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(source)
    (w,) = proto.graph.initializer
    w.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(w), "w"))  # raw, as weights in files are
    return proto


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What is really compiled."""
    calls: list[object] = []
    whole = building.compile_model
    monkeypatch.setattr(building, "compile_model", lambda *args: calls.append(args) or whole(*args))
    return calls


def result(session: tvmfuse.Session) -> bytes:
    return session.run(None, {"x": X})[0].tobytes()


def test_second_build_compiles_nothing_and_gives_the_same(folder: Path, model: onnx.ModelProto, compiled: list[object]) -> None:
    first, second = tvmfuse.build(model, threads=1), tvmfuse.build(model, threads=1)
    assert len(compiled) == 1
    assert result(first) == result(second)
    assert first.manifest == second.manifest
    assert [name for name, _ in second.trace({"x": X})[0]] == [name for name, _ in first.trace({"x": X})[0]]


def test_whatever_a_model_is_made_of_makes_another_one(folder: Path, model: onnx.ModelProto, compiled: list[object]) -> None:
    tvmfuse.build(model, threads=1)
    tvmfuse.build(parsed(SOURCE.replace("1,2,3,4", "1,2,3,5")), threads=1)
    tvmfuse.build(model, threads=2)
    tvmfuse.build(model, threads=1, fuse="never")
    assert len(compiled) == 4 == len(list(folder.iterdir()))


def test_what_the_log_says_counts(folder: Path, model: onnx.ModelProto, compiled: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    tvmfuse.build(model, threads=1)
    monkeypatch.setattr(building.Log, "fingerprint", lambda self: "tuned")
    tvmfuse.build(model, threads=1)
    assert len(compiled) == 2


def test_a_file_and_its_changed_content_are_two(folder: Path, model: onnx.ModelProto, compiled: list[object], tmp_path: Path) -> None:
    onnx.save(model, tmp_path / "m.onnx")
    tvmfuse.build(tmp_path / "m.onnx", threads=1), tvmfuse.build(tmp_path / "m.onnx", threads=1)
    assert len(compiled) == 1
    onnx.save(parsed(SOURCE.replace("Relu", "Neg")), tmp_path / "m.onnx")
    assert result(tvmfuse.build(tmp_path / "m.onnx", threads=1)) != result(tvmfuse.build(model, threads=1))


def test_weights_in_another_file_are_not_taken_for_known(
    folder: Path, model: onnx.ModelProto, compiled: list[object], tmp_path: Path
) -> None:
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    before = result(tvmfuse.build(tmp_path / "m.onnx", threads=1))
    (tmp_path / "w.bin").write_bytes(bytes((tmp_path / "w.bin").stat().st_size))
    assert result(tvmfuse.build(tmp_path / "m.onnx", threads=1)) != before


@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: data[:300] + b"\0\0\0\0" + data[304:], lambda data: b""])
def test_damaged_entries_are_compiled_again(
    folder: Path, model: onnx.ModelProto, compiled: list[object], damage: Callable[[bytes], bytes]
) -> None:
    expected = result(tvmfuse.build(model, threads=1))
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    entry.unlink()
    entry.write_bytes(damage(whole))
    assert result(tvmfuse.build(model, threads=1)) == expected
    assert len(compiled) == 2
    tvmfuse.build(model, threads=1)
    assert len(compiled) == 2


def test_a_folder_that_cannot_be_made_is_done_without(model: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="isn't kept for the next build: .*Not a directory.*; TVMFUSE_CACHE names another folder"):
        result(tvmfuse.build(model, threads=1))


def test_a_full_disk_is_done_without(folder: Path, model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact, "_write", full)
    with pytest.warns(UserWarning, match="isn't kept for the next build: .*No space left"):
        result(session := tvmfuse.build(model, threads=1))
    assert not list(folder.iterdir())
    with pytest.raises(UsageError, match="No space left"):
        session.save(folder / "m.tvmfuse")


def test_switched_off_nothing_is_written(folder: Path, model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, cache.OFF)
    result(tvmfuse.build(model, threads=1))
    assert not folder.exists()


def test_what_was_used_longest_ago_goes_first(folder: Path, model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    session = tvmfuse.build(model, threads=1)
    (entry,) = folder.iterdir()
    monkeypatch.setattr(cache, "LIMIT_BYTES", int(2.5 * entry.stat().st_size))
    for age, name in enumerate("ab"):
        (folder / f"{name}.tvmfuse").write_bytes(entry.read_bytes())
        os.utime(folder / f"{name}.tvmfuse", (time.time() - 10 - age,) * 2)
    (folder / ".c.tvmfuse.1.1.part").write_bytes(b"")
    os.utime(folder / ".c.tvmfuse.1.1.part", (0, 0))
    cache.keep(session.program, "d")
    assert {path.name for path in folder.iterdir()} == {"d.tvmfuse", entry.name}
    assert result(session) == result(tvmfuse.build(model, threads=1))


def test_nan_weights_are_warned_of_each_time(folder: Path, model: onnx.ModelProto) -> None:
    w = onnx.numpy_helper.to_array(model.graph.initializer[0]).copy()
    w[0, 0] = np.nan
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(w, "w"))
    for _ in range(2):
        with pytest.warns(UserWarning, match="NaN in the weights"):
            tvmfuse.build(model, threads=1)


def test_two_builds_at_once_share_the_cache(folder: Path, model: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(model, tmp_path / "m.onnx")
    code = (
        "import sys, numpy as np, tvmfuse; x = np.arange(6, dtype=np.float32).reshape(2, 3);"
        "sys.stdout.buffer.write(tvmfuse.build(sys.argv[1], threads=1).run(None, {'x': x})[0].tobytes())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m.onnx")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = [child.communicate()[0] for child in children]
    assert [child.returncode for child in children] == [0, 0]
    assert outputs == [result(tvmfuse.build(model, threads=1))] * 2
    (entry,) = folder.iterdir()
    artifact.load(entry)
