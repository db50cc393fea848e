"""Whoever only runs a saved model needs TVM's runtime library alone, and may still compile in the same process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import tvmfuse
from tvmfuse import artifact
from tvmfuse.errors import TargetMismatch
from tvmfuse.measure import cpu
from tvmfuse.measure.host import host, host_target, required_features

# What this package depends on and a saved model doesn't need
NEEDLESS = {"tvm", "onnx", "xgboost", "rich", "typer", "jinja2", "psutil", "platformdirs", "filelock"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    w = numpy_helper.from_array(np.random.default_rng(0).standard_normal((256, 256), np.float32), "w")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [256, 256]) for name in "xy")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y], [w]), opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


@pytest.fixture(scope="module")
def saved(model: Path) -> Path:
    path = model.with_name("m.tvmfuse")
    tvmfuse.build(model, threads=2).save(path)
    return path


def in_a_process(code: str, *arguments: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


RUN = """
import sys, threading, numpy as np, tvmfuse
x = np.random.default_rng(1).standard_normal((256, 256), np.float32)
session = tvmfuse.load(sys.argv[1])
(y,) = session.run(None, {"x": x})
assert (np.abs(y - np.maximum(y, 0)) == 0).all() and y.any()
"""
EVERY_CALL = """
bound_to = np.zeros_like(y)
session.bind({"x": x}, {"y": bound_to})()
assert (bound_to == y).all()
assert [name for name, _ in session.trace({"x": x})[0]] == [name for name, _ in session.manifest.costs]
beside = []
others = [threading.Thread(target=lambda: beside.append(session.run(None, {"x": x})[0])) for _ in range(3)]
for other in others: other.start()
for other in others: other.join()
assert len(beside) == 3 and all((z == y).all() for z in beside)
"""
LOADED = """
print(*{module.partition(".")[0] for module in sys.modules})
print(open("/proc/self/maps").read() if sys.platform == "linux" else "")
"""
BUILD = """
built = tvmfuse.build(sys.argv[2], threads=session.manifest.threads)
assert (built.run(None, {"x": x})[0] == y).all() and (session.run(None, {"x": x})[0] == y).all()
assert len(built.profile({"x": x}, repeats=1)) == len(session.profile({"x": x}, repeats=1)) > 0
built.save(sys.argv[1] + ".again")
assert (tvmfuse.load(sys.argv[1] + ".again").run(None, {"x": x})[0] == y).all()
"""


def test_a_saved_model_runs_without_the_compiler(saved: Path) -> None:
    modules, _, mapped = in_a_process(RUN + EVERY_CALL + LOADED, saved).partition("\n")
    assert NEEDLESS & set(modules.split()) == set()
    assert "tvm_compiler" not in mapped and ("tvm_runtime" in mapped or sys.platform != "linux")


def test_a_loaded_model_is_saved_without_the_compiler(saved: Path, tmp_path: Path) -> None:
    in_a_process(RUN + "session.save(sys.argv[2])\nassert 'tvm' not in sys.modules", saved, tmp_path / "n.tvmfuse")
    assert (tmp_path / "n.tvmfuse").read_bytes() == saved.read_bytes()


@pytest.mark.parametrize("shown", [["--json"], []], ids=["json", "table"])
def test_the_command_runs_a_saved_model_without_the_compiler(saved: Path, shown: list[str]) -> None:
    arguments = ["tvmfuse", "run", str(saved), "--random", "0", *shown]
    code = f"import atexit, sys\nsys.argv = {arguments!r}\natexit.register(lambda: print(*sys.modules))\n"
    modules = in_a_process(code + "from tvmfuse.__main__ import main\nmain()").splitlines()[-1].split()
    assert {"tvm", "onnx", "xgboost", "psutil", "jinja2"} & set(modules) == set()
    assert "tvmfuse.runtime" in modules
    assert ("rich.table" in modules) == (not shown), "only a table is for rich to print"


@pytest.mark.parametrize("first", ["", "import tvm\n"], ids=["runtime first", "compiler first"])
def test_the_compiler_may_come_before_or_after(saved: Path, model: Path, first: str) -> None:
    in_a_process(first + RUN + EVERY_CALL + BUILD, saved, model)


def test_the_cpu_itself_confirms_what_the_compiler_finds() -> None:
    """Less would cost every load the compiler's import, more would weaken the check of what a model needs."""
    assert cpu.confirmed() <= set(host().features)
    if sys.platform == "linux":
        assert set(required_features(host_target())) <= cpu.confirmed()


def test_of_what_the_cpu_does_not_confirm_the_compiler_is_asked(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "confirmed", set)
    artifact.load(saved)
    monkeypatch.setattr("tvmfuse.measure.host._features", lambda _: {"sse2"})
    host.cache_clear()
    try:
        with pytest.raises(TargetMismatch, match="built for a CPU with .*, which this one lacks"):
            artifact.load(saved)
    finally:
        host.cache_clear()
