"""`tvmfuse check` and `tvmfuse bench`: results, exit codes and what they pass on."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tests.invoking import Invoke
from tvmfuse import benching, check, compare


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.onnx"
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", values[:1], values[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return path


def test_differences_end_with_code_8(invoke: Invoke, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "check", lambda *_, **__: check.Judgement(("kernels: 1 -> 2",), ("a note",)))
    code, out, err = invoke("check", model, "--against", "d.json")
    assert (code, out) == (8, "kernels: 1 -> 2\n")
    assert "a note" in err and "1 difference" in err and "Traceback" not in err
    code, out, _ = invoke("check", model, "--against", "d.json", "--json")
    assert code == 8 and json.loads(out) == {"ok": False, "differences": ["kernels: 1 -> 2"], "notes": ["a note"]}


def test_writing_and_then_checking_passes(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    code, out, err = invoke("check", model, "--against", file, "--shape", "n=3", "--write", "--no-speed")
    assert (code, out) == (0, "") and "written" in err and json.loads(file.read_text())["speed"] is None
    assert invoke("check", model, "--against", file, "--shape", "n=3", "--no-speed")[0] == 0
    code, out, _ = invoke("check", model, "--against", file, "--shape", "n=5", "--no-speed")
    assert (code, out) == (
        8,
        "input x: recorded as float32 3x4, built as float32 5x4: bind the recorded shapes; nothing else is compared\n",
    )
    code, out, _ = invoke("check", model, "--against", file, "--shape", "n=3", "--numerics", "relaxed", "--no-speed")
    assert (code, out) == (8, "numerics: recorded as exact, built as relaxed; nothing else is compared\n")


def test_a_file_without_its_shapes_is_still_read(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    invoke("check", model, "--against", file, "--shape", "n=3", "--write", "--no-speed")
    data = json.loads(file.read_text())
    assert data.pop("inputs") == {"x": "float32 3x4"} and data.pop("numerics") == "exact"
    file.write_text(json.dumps(data))
    assert invoke("check", model, "--against", file, "--shape", "n=3", "--no-speed")[0] == 0
    code, out, _ = invoke("check", model, "--against", file, "--shape", "n=5", "--no-speed")
    assert code == 8 and out.startswith("bits of output y")


def test_check_without_its_file_says_how_to_write_it(invoke: Invoke, model: Path, tmp_path: Path) -> None:
    code, _, err = invoke("check", model, "--against", tmp_path / "absent.json")
    assert code == 2 and err == f"tvmfuse: there is no file {tmp_path / 'absent.json'} yet; the same with --write writes it\n"


def test_check_passes_its_options_on(invoke: Invoke, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    monkeypatch.setattr(check, "check", lambda _, __, **options: asked.update(options) or check.Judgement(()))
    invoke(
        "check", model, "--against", "d.json", "--tolerance", "0.3", "--threads", "1", "--no-speed", "--fuse", "always", "--shape", "n=2"
    )
    assert asked == {
        "shapes": {"n": 2}, "threads": 1, "fuse": "always", "logs": None, "write": False, "speed": False, "tolerance": 0.3,
        "numerics": "exact",
    }  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    calls: dict[str, object] = {}

    def bench(title: str, _model: object, feeds: dict, entries: list, seconds: float, **options: object) -> list[compare.Row]:
        calls.update(title=title, shapes={name: x.shape for name, x in feeds.items()}, entries=entries, seconds=seconds, **options)
        timed = {"min": 1e-3, "p50": 2e-3, "p90": 3e-3, "p99": 4e-3}
        ratio = compare.Ratio(1.0, (0.9, 1.1), (0.95, 1.05))
        return [
            compare.Row(title, "tvmfuse measured", 1, 2e-3, ratio, timed, 1e-7, (2e-3,) * 5, 1.0, 2**20, 700.0),
            compare.Row(title, "mnn", 1, reason="not installed: pip install MNN"),
        ]

    monkeypatch.setattr(benching, "bench", bench)
    return calls


def test_bench_prints_a_row_each_and_names_what_is_absent(invoke: Invoke, model: Path, asked: dict[str, object]) -> None:
    code, out, err = invoke("bench", model, "--shape", "n=3", "--threads", "2", "--seconds", "1")
    assert code == 0
    assert all(text in out for text in ("tvmfuse measured", "2 ms", "4 ms", "700", "1.0e-07", "mnn"))
    assert "mnn" in err and "pip install MNN" in err
    assert asked["shapes"] == {"x": (3, 4)} and asked["seconds"] == 1 and asked["callers"] == 2
    names = [(e.name, e.threads) for e in asked["entries"]]  # type: ignore[attr-defined]
    ours = ["tvmfuse measured", "tvmfuse measured (A/A)", "tvmfuse always", "tvmfuse never"]
    assert [name for name, _ in names[:4]] == ours
    assert [t for name, t in names if name == "onnxruntime"] == [1, 2] and [t for name, t in names if name == "tract"] == [1]


def test_bench_as_json(invoke: Invoke, model: Path, asked: dict[str, object]) -> None:
    code, out, _ = invoke("bench", model, "--shape", "n=3", "--json", "--peer", "onnxruntime")
    rows = json.loads(out)
    assert code == 0 and rows[0]["percentiles_s"]["p99"] == 4e-3 and rows[1]["reason"].startswith("not installed")
    assert {e.name for e in asked["entries"] if not e.name.startswith("tvmfuse")} == {"onnxruntime"}  # type: ignore[attr-defined]


def test_bench_knows_its_peers(invoke: Invoke, model: Path) -> None:
    code, _, err = invoke("bench", model, "--shape", "n=3", "--peer", "torch")
    assert code == 2 and "torch" in err and "openvino" in err
