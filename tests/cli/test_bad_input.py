"""Every command that takes a model, on models that are none: one line on stderr, the error's exit code, nothing written."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.invoking import Invoke

COMMANDS = {
    "build": ["-o", "out.tvmfuse"],
    "run": ["--random", "0", "--output", "out"],
    "tune": ["--logs", "records"],
    "explain": [],
    "report": ["-o", "out.html"],
    "bench": [],
    "check": ["--against", "out.json", "--write"],
}


def relu(*shape: int | str, op: str = "Relu", domain: str = "") -> bytes:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], name="odd", domain=domain)], "g", values[:1], values[1:])
    imports = [helper.make_opsetid("", 17)] + [helper.make_opsetid(domain, 1)] * bool(domain)
    return helper.make_model(graph, opset_imports=imports).SerializeToString()


MODELS = {
    "empty": (b"", [], 3, "is empty"),
    "text": (b"not a model\n", [], 3, "not ONNX"),
    "truncated": (relu(2, 3)[:-10], [], 3, "m.onnx"),
    "unbound": (relu("N", 3), [], 3, "--shape N=1"),
    "unknown dimension": (relu("N", 3), ["--shape", "M=1"], 2, "--shape M=1 binds nothing"),
    "wrong rank": (relu("N", 3), ["--shape", "x=1,2,3"], 2, "3 dimensions"),
    "custom operator": (relu(2, 3, op="Mystery", domain="com.example"), [], 4, "com.example::Mystery"),
    "malformed shape": (relu("N", 3), ["--shape", "N"], 2, "--shape takes NAME=N"),
    "given twice": (relu("N", 3), ["--shape", "N=1", "--shape", "N=2"], 2, "given twice for 'N'"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("case", MODELS)
def test_one_line_and_nothing_written(invoke: Invoke, command: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, options, code, said = MODELS[case]
    monkeypatch.chdir(tmp_path)
    Path("m.onnx").write_bytes(content)
    ended, out, err = invoke(command, "m.onnx", *COMMANDS[command], *options)
    assert (ended, out) == (code, ""), err
    assert err.count("\n") == 1 and err.startswith("tvmfuse: ") and said in err, err
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_the_models_here_are_what_they_say(tmp_path: Path) -> None:
    onnx.checker.check_model(onnx.load_model_from_string(MODELS["unbound"][0]))
