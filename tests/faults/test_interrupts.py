"""Ctrl-C, or a kill, at any moment of any command: no process and no temporary file is left, and what is written is whole or absent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from onnx import TensorProto, helper

import tvmfuse
from tvmfuse.decide.log import Log

# It says when Python itself has started: an interrupt before that is none of ours.
COMMAND = [sys.executable, "-c", "print(flush=True); from tvmfuse.__main__ import main; main()"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    weights = [
        onnx.numpy_helper.from_array(rng.standard_normal((64, 64), np.float32), "w"),
        onnx.numpy_helper.from_array(rng.standard_normal(64, np.float32), "b"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "b"], ["s"]),
        helper.make_node("Tanh", ["s"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [32, 64]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def started(tmp_path: Path, *arguments: str | Path) -> subprocess.Popen[str]:
    """A command as a terminal starts it: in a process group of its own. Everything temporary goes to a folder of its own."""
    (tmp_path / "tmp").mkdir()
    folders = {"TMPDIR": "tmp", "XDG_DATA_HOME": "data", "XDG_CACHE_HOME": "cache", "TVMFUSE_LOGS": "logs"}
    environment = os.environ | {name: str(tmp_path / folder) for name, folder in folders.items()}
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=environment, cwd=tmp_path, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "\n"
    return process


def left_over(group: int, within_s: float = 20.0) -> list[str]:
    """Processes of a group that are still there after a while."""
    deadline = time.monotonic() + within_s
    while True:
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            try:
                if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.info["cmdline"] or ()))
            except (psutil.Error, ProcessLookupError):
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def temporary(tmp_path: Path) -> list[str]:
    """Locks stay: to remove one is a race. Everything else that is temporary has to be gone."""
    inside = [path for path in (tmp_path / "tmp").rglob("*") if path.suffix != ".lock"]
    return [path.name for path in inside] + [path.name for path in tmp_path.rglob("*.part")]


@pytest.mark.parametrize(
    ("command", "after_s"),
    [
        *(("build", moment) for moment in (0.1, 1.0, 2.0, 3.0)),
        *(("run", moment) for moment in (0.5, 2.5)),
        ("explain", 1.5),
        *(("tune", moment) for moment in (1.5, 4.0, 8.0)),
        ("demo", 5.0),
        ("report", 4.0),
        ("check", 3.0),
        *(("bench", moment) for moment in (3.0, 6.0)),
        ("doctor", 2.5),
        ("log", 0.5),
    ],
)
def test_interrupted_command_leaves_nothing(model: Path, tmp_path: Path, command: str, after_s: float) -> None:
    arguments = {
        "build": [model, "-o", tmp_path / "m.tvmfuse"],
        "run": [model, "--random", "0", "--output", tmp_path / "out"],
        "explain": [model],
        "tune": [model, "--budget", "60s", "--logs", tmp_path / "logs"],
        "demo": ["--seconds", "60", "--logs", tmp_path / "logs"],
        "report": [model, "-o", tmp_path / "report.html", "--seconds", "60"],
        "check": [model, "--against", tmp_path / "decisions.json", "--write"],
        "bench": [model, "--seconds", "60", "--peer", "onnxruntime"],
        "doctor": [],
        "log": ["stats"],
    }[command]
    process = started(tmp_path, command, *arguments)
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    over = process.returncode == 0 and (out or err) and command not in ("tune", "demo", "report", "bench")
    assert process.returncode == 130 or over, err
    assert "Traceback" not in err
    assert left_over(process.pid) == []
    assert temporary(tmp_path) == []
    if (tmp_path / "m.tvmfuse").exists():
        tvmfuse.load(tmp_path / "m.tvmfuse")
    for written in tmp_path.glob("*.html"), tmp_path.glob("decisions.json"):
        assert all(path.read_text().rstrip().endswith(("</html>", "}")) for path in written)
    if (tmp_path / "logs").exists():
        assert not Log([tmp_path / "logs"]).damage


KILLED_BEFORE = """
import os, signal, sys
import tvmfuse
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
tvmfuse.build(sys.argv[1], threads=1).save(sys.argv[2])
"""


def test_killed_while_saving_leaves_the_old_artifact(model: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "m.tvmfuse"
    tvmfuse.build(model, threads=1).save(artifact)
    before = artifact.read_bytes()
    killed = subprocess.run([sys.executable, "-c", KILLED_BEFORE, model, artifact])
    assert killed.returncode == -signal.SIGKILL
    assert artifact.read_bytes() == before


INTERRUPTED_AT = """
import atexit, os, signal, sys

def at(event, arguments):
    package, _, inside = where.partition(".")
    if event == "import" and arguments[0] == where and (not inside or package in sys.modules):
        os.kill(os.getpid(), signal.SIGINT)

where = sys.argv.pop(1)
sys.addaudithook(at)
atexit.register(print, "it went through the import")
from tvmfuse.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "tvm_ffi.core", "tvm.ir", "tvm.relax.op.base"])
def test_interrupted_import_ends_like_any_interrupt(model: Path, module: str) -> None:
    """At once: TVM's extension module doesn't survive an exception that goes through its import."""
    found = subprocess.run([sys.executable, "-c", INTERRUPTED_AT, module, "explain", model], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "")


INTERRUPTED_IN = """
import os, signal, sys, time
import tvmfuse.graph.rewrite
from tvmfuse.__main__ import main

def interrupted(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)

class Finalized:
    __del__ = interrupted

def explain(*_, **__):
    Finalized()
    time.sleep(60)

if sys.argv.pop(1) == "finalizer":
    vars(tvmfuse)["explain"] = explain
else:
    tvmfuse.graph.rewrite.substitute = interrupted
main()
"""


@pytest.mark.parametrize("where", ["finalizer", "pass"])
def test_interrupt_in_a_place_that_spoils_it_ends_like_any_interrupt(model: Path, where: str) -> None:
    """An exception in a finalizer is swallowed; one in a pass lets TVM complain of its unfinished block."""
    command = [sys.executable, "-c", INTERRUPTED_IN, where, "explain", model, "--no-bound"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (found.returncode, found.stdout, found.stderr) == (130, "", "")


def test_terminated_command_cleans_up_too(model: Path, tmp_path: Path) -> None:
    process = started(tmp_path, "bench", model, "--seconds", "60", "--peer", "onnxruntime")
    time.sleep(4)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert left_over(process.pid) == [] and temporary(tmp_path) == []


def test_interrupt_that_the_caller_ignores_stays_ignored(model: Path) -> None:
    """As for a job in the background of a script."""
    script = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + INTERRUPTED_AT
    found = subprocess.run([sys.executable, "-c", script, "tvm.ir", "explain", model], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
