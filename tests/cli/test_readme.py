"""Every code block of README.md runs, in the order in which it stands there.

enc.onnx is a small model with the encoder's inputs, tuning gets seconds in place of minutes, and `make` finds an environment whose
programs only write down how they were called: what they do is tested elsewhere.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tvmfuse import cli
from tvmfuse.errors import TooNoisy

ROOT = Path(__file__).parents[2]
SHORTER = {
    "--budget 10m": "--budget 6s",
    'budget="10m"': 'budget="6s"',
    "-o report.html": "-o report.html --seconds 0.2",
    "tvmfuse bench enc.onnx": "tvmfuse bench enc.onnx --seconds 0.2 --peer onnxruntime",
}
MAY_END_WITH = {"doctor": TooNoisy.exit_code, "tune": TooNoisy.exit_code}  # what this machine does meanwhile isn't the README's fault
PROGRAMS = {"demo": "tvmfuse demo", "test": "python -m pytest", "bench": "python -m bench"}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$|((?:^    [^\n]+\n)+)", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """(language, text) of the fenced blocks, and of the indented ones, which are for the shell."""
    text = (ROOT / "README.md").read_text()
    found = []
    for language, fenced, indented in (match.groups() for match in BLOCK.finditer(text)):
        body = fenced or re.sub(r"^    ", "", indented, flags=re.MULTILINE)
        for long, short in SHORTER.items():
            body = body.replace(long, short)
        found.append((language or "shell", body))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader stands: enc.onnx is here, and the Makefile with an environment of stubs."""
    path = tmp_path_factory.mktemp("reader")
    rng = np.random.default_rng(0)
    weights = {"w": (8, 1, 1, 1), "b": (8, 1, 1), "v": (8, 2, 1, 1)}
    nodes = [
        helper.make_node("Conv", ["feat_erb", "w"], ["c"], name="conv1"),
        helper.make_node("Add", ["c", "b"], ["a"], name="bias"),
        helper.make_node("Relu", ["a"], ["e0"], name="relu"),
        helper.make_node("Conv", ["feat_spec", "v"], ["c0"], name="conv2"),
    ]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in {"feat_erb": [1, 1, "S", 32], "feat_spec": [1, 2, "S", 96]}.items()
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 8, "S", None]) for name in ("e0", "c0")]
    arrays = [onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32), name) for name, shape in weights.items()]
    graph = helper.make_graph(nodes, "enc", inputs, outputs, arrays)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path / "enc.onnx")

    for name in ("Makefile", "pyproject.toml"):
        (path / name).write_bytes((ROOT / name).read_bytes())
    programs = path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "ruff", "mypy", "tvmfuse"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> called.txt\n')
        (programs / name).chmod(0o755)
    for extra in ("test", "demo", "bench"):
        (path / ".venv" / f".installed-{extra}").touch()
    return path


@pytest.fixture(autouse=True)
def reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(folder / "home"))
    monkeypatch.setenv("TVMFUSE_LOGS", str(folder / "home/logs"))


@pytest.mark.parametrize(("language", "text"), [pytest.param(*block, id=f"{at}-{block[0]}") for at, block in enumerate(blocks())])
def test_block_runs(language: str, text: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    if language == "python":
        exec(compile(text, "README.md", "exec"), {})
        return
    assert language in ("shell", "sh", "console", "bash"), f"no test knows how to run {language}"
    for line in text.splitlines():
        command = shlex.split(line, comments=True)
        if command[:1] == ["tvmfuse"]:
            monkeypatch.setattr(sys, "argv", command)
            with pytest.raises(SystemExit) as stop:
                cli.main()
            assert (stop.value.code or 0) in (0, MAY_END_WITH.get(command[1], 0)), (line, capfd.readouterr().err)
        elif command:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, (line, done.stderr)
            assert command[0] != "make" or PROGRAMS[command[1]] in Path("called.txt").read_text()


def test_the_readme_has_blocks_of_both_kinds() -> None:
    assert {"python", "shell"} <= {language for language, _ in blocks()}
