"""A model file that would crash, fill the memory or never end does so in a child, and becomes one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import parser

from tvmfuse.errors import ModelError
from tvmfuse.model import safety, sandbox

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = parser.parse_model("""<ir_version: 8, opset_import: ["" : 13]> g (float[1,4] x) => (float[1,4] y) { y = Relu(x) }""")
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def scripted(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """The child does something else, as a fault in its parser might."""
    (folder / "script.py").write_text(body)
    monkeypatch.setattr(sandbox.script, "__file__", str(folder / "script.py"))


def test_a_sound_model_passes(path: Path) -> None:
    assert sandbox.examine(path) is None


def test_the_checkers_complaint_comes_from_the_child(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, path.parent, """print('{"parsed": true, "complaint": "not a model"}')""")
    with pytest.raises(ModelError, match="is not a valid ONNX model: not a model"):
        safety.read(path)


def test_millions_of_empty_messages_do_not_fill_the_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes each, some two hundred in memory: a field of its graph, in a message of that length."""
    monkeypatch.setattr(sandbox, "MEMORY_BYTES", 512 * MIB)
    nodes = b"\x0a\x00" * (8 * MIB)
    length = bytes([len(nodes) & 127 | 128, len(nodes) >> 7 & 127 | 128, len(nodes) >> 14 & 127 | 128, len(nodes) >> 21])
    path.write_bytes(b"\x08\x08" + b"\x3a" + length + nodes)
    with pytest.raises(ModelError, match="(to check its .* took more than|truncated, damaged or not ONNX)"):
        safety.read(path)


def test_a_chain_of_subgraphs_ends_in_an_error(path: Path) -> None:
    inner = b""
    for _ in range(20_000):  # graph -> node -> attribute -> graph, each the only field of its message
        for tag in (b"\x32", b"\x2a", b"\x0a"):
            inner = tag + varint(len(inner)) + inner
    path.write_bytes(b"\x08\x08" + b"\x3a" + varint(len(inner)) + inner)
    with pytest.raises(ModelError, match="truncated, damaged or not ONNX"):
        safety.read(path)


def varint(number: int) -> bytes:
    digits = []
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended its process with SIGSEGV"),
        ("import os; os.abort()", "ended its process with SIGABRT"),
        ("raise MemoryError", "took more than"),
        ("import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 2))\nwhile True: pass", "took longer than"),
        ("raise RecursionError('too deep')", "failed: RecursionError: too deep"),
    ],
)
def test_a_child_that_dies_says_how(path: Path, monkeypatch: pytest.MonkeyPatch, body: str, says: str) -> None:
    scripted(monkeypatch, path.parent, body)
    with pytest.raises(ModelError, match=f"model.onnx is no sound model: to check its .* bytes {says}"):
        safety.read(path)


def test_a_child_that_sleeps_is_ended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, path.parent, "import time; time.sleep(600)")
    monkeypatch.setattr(sandbox, "WAIT_FACTOR", 0.01)
    with pytest.raises(ModelError, match="took longer than 0.2 s"):
        safety.read(path)


def test_the_child_imports_nothing_from_where_it_is_called(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path.parent / "json.py").write_text("raise SystemExit('a file beside the model was imported')")
    monkeypatch.chdir(path.parent)
    assert sandbox.examine(path) is None


def test_limits_are_set_before_the_file_is_touched(path: Path) -> None:
    os.truncate(path, 200 * MIB)  # zeros, without a block on the disk
    limits = [str(64 * MIB), "5", os.pathsep.join(sys.path)]
    child = subprocess.run([sys.executable, "-I", sandbox.script.__file__, path, *limits], capture_output=True, text=True)
    assert child.returncode and "MemoryError" in child.stderr
