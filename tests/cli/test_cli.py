"""What a person meets: exit codes, one line instead of a traceback, results on stdout and everything else on stderr."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from rich.cells import cell_len
from rich.console import Console

import tvmfuse
from tests.invoking import Invoke
from tvmfuse import check as checking
from tvmfuse import cli, errors
from tvmfuse.artifact import LIBRARY, MANIFEST, WEIGHTS
from tvmfuse.cli.arguments import parse_shapes
from tvmfuse.cli.progress import progress
from tvmfuse.cli.tables import print_table
from tvmfuse.explaining import Blocked, Explained, Option
from tvmfuse.model.shapes import bind
from tvmfuse.values import Candidate, Epilogue, Matmul, Operand, Site, Step, Verdict, Workload

SITE = Site(
    name="conv1",
    anchor="matmul",
    epilogue=("add", "relu"),
    crossed=("reshape",),
    placement="register",
    cut=2,
    source="measured",
    reason=None,
    workload=Workload(Matmul(1, 8, 8, 8), Epilogue((Step("add", ("%0", "$0")), Step("relu", ("%1",))), (Operand((8,), (1,)),))),
    ratio=0.9,
    ci=(0.88, 0.92),
)


BLOCKED = Blocked("act", "probabilities", "second user", "act stays below lv1: two users", "let it read act", "conv1")
DEFAULT, TILE = Candidate("register", 2, (("mr", 6),)), Candidate("tile", 1, (("mr", 6),))
EXPLAINED = Explained(
    site=SITE,
    why="measured: at least 8.0% faster",
    undecided=False,
    hint=None,
    predicted_s=2e-6,
    predicted_ratio=0.95,
    bytes_saved=512,
    bound_s=1e-6,
    options=(Option(DEFAULT, 2e-6, 1.0), Option(TILE, 1.9e-6, 0.95, Verdict("wins", TILE, 0.9, (0.88, 0.92), 0.001, 15, "for this test"))),
    blocked=(BLOCKED,),
)


class FakeReport:
    sites = (EXPLAINED,)
    refusals = (BLOCKED,)

    def site(self, name: str) -> Explained:
        if name not in SITE.name:
            raise errors.UsageError(f"no site is called {name!r}; there are: conv1")
        return EXPLAINED

    def before_after(self, name: str) -> tuple[str, str]:
        return "lv: reshape(act)", "act: relu(lv)"


@dataclasses.dataclass
class Summary:
    sites: tuple[Site, ...] = (SITE,)
    results: tuple[SimpleNamespace, ...] = (SimpleNamespace(too_noisy=True), SimpleNamespace(too_noisy=False))
    left: int = 0
    gate_failure: str | None = None

    def outcome(self, workload: Workload) -> str:
        return "begun, a later run goes on with it"

    def __str__(self) -> str:
        return "sites: 1 tuned 1"


class FakeSession:
    """y = x + 1, with a second output whose name is no file name."""

    sites = (SITE,)
    kernel_count = 3
    manifest = SimpleNamespace(toolchain={"tvmfuse": "7.8"}, cpu="z80")

    def get_inputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="x", shape=(2, 3), dtype="float32")]

    def get_outputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="y", shape=(2, 3), dtype="float32"), SimpleNamespace(name="a/b", shape=(1,), dtype="float32")]

    def run(self, names: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        if "x" not in feeds:
            raise errors.UsageError("input 'x' is missing")
        return [feeds["x"] + 1, np.array([np.nan], np.float32)]

    def save(self, path: Path) -> None:
        Path(path).write_text("artifact")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict]:
    """What the command line asked of each function of the library, which is replaced."""
    calls: dict[str, dict] = {}

    def fake(name: str, result: object) -> Callable[..., object]:
        def call(model: object, **options: object) -> object:
            calls[name] = {"model": model, **options}
            return result

        return call

    for name, result in {
        "build": FakeSession(),
        "load": FakeSession(),
        "tune": Summary(),
        "explain": FakeReport(),
    }.items():
        monkeypatch.setitem(vars(tvmfuse), name, fake(name, result))
    return calls


@pytest.fixture
def model(tmp_path: Path) -> Path:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    path = tmp_path / "relu.onnx"
    onnx.save(helper.make_model(graph), path)
    return path


def test_build_passes_its_options_on_and_writes_the_artifact(invoke: Invoke, asked: dict, model: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "out.tvmfuse"
    options = ["--shape", "S=1", "--shape", "x=2,3", "--fuse", "never", "--threads", "2"]
    options += ["--target", '{"kind": "llvm"}', "--host", "arm-8-d08-3-0123abcd"]
    done = invoke("build", model, "-o", artifact, *options)
    assert (done.code, artifact.read_text()) == (0, "artifact")
    assert asked["build"] == {
        "model": model,
        "shapes": {"S": 1, "x": (2, 3)},
        "target": {"kind": "llvm"},
        "threads": 2,
        "fuse": "never",
        "logs": None,
        "numerics": "exact",
        "rpc": None,
        "host": "arm-8-d08-3-0123abcd",
    }
    assert "conv1" in done.out and "register 2/2" in done.out and "0.900 [0.880, 0.920]" in done.out
    assert "1 site, 3 kernels" in done.err


def test_numerics_is_passed_on_and_relaxed_sites_are_labelled(
    invoke: Invoke, asked: dict, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = {"build": ["-o", tmp_path / "a"], "run": ["--random", "0"], "tune": [], "explain": []}
    for command, options in commands.items():
        assert invoke(command, model, "--numerics", "relaxed", *options).code == 0
        assert asked["build" if command == "run" else command]["numerics"] == "relaxed"
    assert "winograd" not in invoke("explain", model).out
    measured = dataclasses.replace(SITE, algorithm="winograd4", relative_error=1.5e-6)
    for site, label in (
        (measured, "by winograd4 (error 1.5e-06)"),
        (dataclasses.replace(measured, relative_error=None, source="predicted"), "by winograd4 (unmeasured)"),
        (dataclasses.replace(SITE, why_not_relaxed="Winograd needs stride 1"), "Winograd needs stride 1"),
    ):
        report = SimpleNamespace(sites=[dataclasses.replace(EXPLAINED, site=site)], refusals=[])
        monkeypatch.setitem(vars(tvmfuse), "explain", lambda *_, report=report, **__: report)
        assert label in invoke("explain", model).out
    assert json.loads(invoke("explain", model, "--json").out)["sites"][0]["why_not_relaxed"] == "Winograd needs stride 1"


def test_json_is_all_that_stdout_gets(invoke: Invoke, asked: dict, model: Path, tmp_path: Path) -> None:
    for command in (["build", model, "-o", tmp_path / "a"], ["tune", model], ["explain", model]):
        site = json.loads(invoke(*command, "--json").out)["sites"][0]
        assert (site["name"], site["ratio"], site["ci"], site["workload_hash"]) == ("conv1", 0.9, [0.88, 0.92], SITE.workload.hash())


def test_explain_adds_prediction_and_refusals(invoke: Invoke, asked: dict, model: Path) -> None:
    done = invoke("explain", model)
    assert "predicted us" in done.out and "act stays below lv1: two users [second user: probabilities]" in done.out
    assert "what could be done: let it read act" in done.out and "1 site, 1 refusal;" in done.err
    told = json.loads(invoke("explain", model, "--json").out)
    assert (told["sites"][0]["predicted_s"], told["sites"][0]["bytes_saved"]) == (2e-6, 512)
    assert (told["refusals"][0]["node"], told["sites"][0]["options"][1]["verdict"]["ci"]) == ("probabilities", [0.88, 0.92])


def test_the_command_that_explain_suggests_keeps_the_shapes(invoke: Invoke, asked: dict, model: Path) -> None:
    assert f"`tvmfuse explain {model} --shape T=8 SITE` tells all" in invoke("explain", model, "--shape", "T=8").err


def test_explain_of_a_model_without_sites_speaks_of_none(invoke: Invoke, asked: dict, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeReport, "sites", ())
    monkeypatch.setattr(FakeReport, "refusals", ())
    done = invoke("explain", model)
    assert (done.code, done.out, "no sites: there is no matmul" in done.err, "SITE" in done.err) == (0, "", True, False)


def test_explain_tells_all_of_one_site(invoke: Invoke, asked: dict, model: Path) -> None:
    done = invoke("explain", model, "conv", "--before-after")
    assert "tile@1 mr=6" in done.out and "wins: for this test" in done.out and "not in the loop: act" in done.out
    order = [done.out.index(text) for text in ("before hoisting", "reshape(act)", "after hoisting", "relu(lv)")]
    assert order == sorted(order)
    assert json.loads(invoke("explain", model, "conv", "--before-after", "--json").out)["after"] == "act: relu(lv)"
    absent = invoke("explain", model, "nothing")
    assert (absent.code, "there are: conv1" in absent.err) == (2, True)
    assert invoke("explain", model, "--before-after").code == 2


def test_report_appears_whole_or_not_at_all(
    invoke: Invoke, asked: dict, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tvmfuse.report.collect.collect", lambda *_: SimpleNamespace(counts=lambda: {"found": 3}, timings=[]))
    monkeypatch.setattr("tvmfuse.report.page.render", lambda findings: "<p>")
    done = invoke("report", model, "-o", tmp_path / "r.html")
    assert (done.code, (tmp_path / "r.html").read_text(), "3 found" in done.err) == (0, "<p>", True)

    def broken(findings: object) -> str:
        raise RuntimeError("no template")

    monkeypatch.setattr("tvmfuse.report.page.render", broken)
    assert invoke("report", model, "-o", tmp_path / "other.html").code == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.html", "relu.onnx"]


def test_a_table_too_wide_for_the_terminal_becomes_paragraphs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"site": "conv[bold]1", "why": "x" * 50, "hint": ""}]
    for width, wide in ((200, True), (40, False)):
        console = Console(width=width, force_terminal=True, color_system=None)
        monkeypatch.setattr("tvmfuse.cli.tables.stdout", lambda console=console: console)
        print_table(rows)
        lines = capsys.readouterr().out.splitlines()
        assert ("site" in lines[0] and "why" in lines[0]) is wide
        assert "conv[bold]1" in lines[1 if wide else 0]


def test_at_80_columns_the_workload_stands_below(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=80, force_terminal=True, color_system=None)
    monkeypatch.setattr("tvmfuse.cli.tables.stdout", lambda: console)
    head = "/model/decoder/" + "layers/" * 10
    names = ("/stem/Conv", f"{head}q/MatMul", f"{head}k/MatMul")
    rows = [{"site": name, "placement": "register 2/2", "why": "x" * 80} for name in names]
    print_table(rows, [({"site": row["site"], "placement": row["placement"]}, ("matmul 8x8x8 | " + "add " * 20,)) for row in rows])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines if not line.startswith(" ")][:2] == [["site", "placement"], ["/stem/Conv", "register", "2/2"]]
    cut = [line.split()[0] for line in lines if line.startswith("…")]
    assert [name[-9:] for name in cut] == ["/q/MatMul"[-9:], "/k/MatMul"[-9:]]
    assert sum(line.startswith("  matmul 8x8x8") for line in lines) == 3


def test_names_are_cut_to_the_columns_that_they_take(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 50 columns in 25 characters, and of 45 where a line break is written out."""
    monkeypatch.setattr("tvmfuse.cli.tables.stdout", lambda: Console(width=40, color_system=None))
    names = ("層" * 25, "/a" * 20, "\n" + "b" * 43)
    print_table([{"site": name, "why": "x" * 80} for name in names], [({"site": name, "source": "default"}, ("matmul",)) for name in names])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == ["source", *("default", "matmul") * 3]
    cut = [line.split() for line in lines if line.startswith("…")]
    assert [len(words) for words in cut] == [2, 2, 2]  # not cut again at their end
    assert max(map(cell_len, lines)) == 40


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_waits_for_nothing_large(option: str) -> None:
    program = "import atexit, sys; from tvmfuse import cli; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); cli.main()"
    done = subprocess.run([sys.executable, "-c", program, option], capture_output=True, text=True)
    assert done.stdout and {"tvm", "onnx", "numpy", "rich", "filelock", "jinja2"} & set(done.stderr.split()) == set()


def test_check_has_one_default_tolerance(invoke: Invoke, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "check", lambda *_, tolerance, **__: checking.Judgement((), (f"tolerance {tolerance}",)))
    assert f"tolerance {checking.TOLERANCE}" in invoke("check", model, "--against", model.with_name("c.json")).err


def test_progress_says_what_is_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tvmfuse.cli.progress.Console", lambda stderr: Console(stderr=True, width=120, force_terminal=True))
    with progress("enc.onnx") as tell:
        tell(0.5, "7 of 20 sites, best gain 6.1%")
    shown = capsys.readouterr().err
    assert "7 of 20 sites, best gain 6.1%" in shown and "0:00:00 left" in shown
    with progress("enc.onnx") as tell:
        tell(0.5, "a long name" * 20)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert "a long name" in plain and max(map(len, plain.splitlines())) <= 120, "nothing wraps"
    assert plain.count("\n") == 1


def test_names_are_no_markup(invoke: Invoke, asked: dict, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeSession, "sites", (dataclasses.replace(SITE, name="conv[bold]1"),))
    assert "conv[bold]1" in invoke("build", model, "-o", model.with_name("a")).out


def test_names_do_not_steer_the_terminal(invoke: Invoke, asked: dict, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "conv\x1b[2J\rx"
    blocked = dataclasses.replace(BLOCKED, op=hostile, why=f"{hostile} stays below lv1")
    monkeypatch.setattr(FakeReport, "sites", (dataclasses.replace(EXPLAINED, site=dataclasses.replace(SITE, name=hostile)),))
    monkeypatch.setattr(FakeReport, "refusals", (blocked,))
    out = invoke("explain", model).out
    assert out.count("conv\\x1b[2J\\rx") == 2 and "\x1b" not in out and "\r" not in out


def test_run_reads_npy_and_writes_npy(invoke: Invoke, asked: dict, model: Path, tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.save(tmp_path / "x.npy", x)
    done = invoke("run", model, "--input", f"x={tmp_path / 'x.npy'}", "--output", tmp_path / "out", "--json")
    assert done.code == 0
    assert np.array_equal(np.load(tmp_path / "out" / "y.npy"), x + 1)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["a%2Fb.npy", "y.npy"]
    assert json.loads(done.out)["y"] == {"shape": [2, 3], "dtype": "float32", "min": 1.0, "mean": 3.5, "max": 6.0}
    assert json.loads(done.out)["a/b"]["max"] is None


def test_run_draws_the_inputs_that_are_not_given(invoke: Invoke, asked: dict, model: Path) -> None:
    first, again, other = (invoke("run", model, "--random", seed).out for seed in ("1", "1", "2"))
    assert first == again != other


def test_run_opens_an_artifact(invoke: Invoke, asked: dict, tmp_path: Path) -> None:
    artifact = tmp_path / "m.tvmfuse"
    artifact.touch()
    done = invoke("run", artifact, "--random", "0")
    assert (done.code, "made by tvmfuse 7.8 for z80;" in done.err) == (0, True)
    assert "build" not in asked
    refused = invoke("run", artifact, "--random", "0", "--shape", "S=1")
    assert (refused.code, "settled when the artifact was built" in refused.err) == (2, True)


def test_tune_is_quiet_where_no_terminal_is(invoke: Invoke, asked: dict, model: Path) -> None:
    done = invoke("tune", model, "--budget", "5s", "--shape", "S=1")
    assert done.err == "sites: 1 tuned 1\n"
    assert asked["tune"]["budget"] == "5s" and asked["tune"]["shapes"] == {"S": 1}
    asked["tune"]["progress"](0.5, "conv1")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.UsageError, 2),
        (errors.ModelError, 3),
        (errors.UnsupportedError, 4),
        (errors.TargetMismatch, 5),
        (errors.TooNoisy, 6),
        (errors.DeviceError, 7),
        (errors.CheckFailed, 8),
        (errors.WrongBits, 8),
        (KeyboardInterrupt, 130),
        (RuntimeError, 1),
    ],
)
def test_exit_code_and_one_line(
    invoke: Invoke, model: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error("what went wrong")

    monkeypatch.setitem(vars(tvmfuse), "explain", fail)
    done = invoke("explain", model)
    assert (done.code, done.out) == (code, "")
    assert "Traceback" not in done.err
    assert code == 130 or "what went wrong" in done.err


def test_error_that_an_interrupt_became_is_an_interrupt(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM makes an empty RuntimeError of a KeyboardInterrupt in one of its callbacks."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError

    monkeypatch.setitem(vars(tvmfuse), "explain", fail)
    monkeypatch.setattr(sys, "argv", ["tvmfuse", "explain", str(model)])
    with pytest.raises(KeyboardInterrupt):
        cli.main(interrupted=lambda: True)


def test_debug_shows_the_traceback(invoke: Invoke, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise errors.ModelError("what went wrong")

    monkeypatch.setitem(vars(tvmfuse), "explain", fail)
    with pytest.raises(errors.ModelError):
        invoke("--debug", "explain", model)


def test_tuning_that_could_decide_nothing_ends_with_6(invoke: Invoke, asked: dict, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = Summary(results=(SimpleNamespace(too_noisy=True),))
    monkeypatch.setitem(vars(tvmfuse), "tune", lambda *_, **__: noisy)
    done = invoke("tune", model)
    assert (done.code, "stop what else runs here" in done.err, "conv1" in done.out) == (6, True, True)


def test_tuning_that_could_not_compare_the_whole_model_ends_with_7(
    invoke: Invoke, asked: dict, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vars(tvmfuse), "tune", lambda *_, **__: Summary(gate_failure="device 0 of h:1/pi: the process died"))
    done = invoke("tune", model)
    assert (done.code, "conv1" in done.out) == (7, True)
    assert "the whole model could not be compared: device 0 of h:1/pi: the process died; what was measured of its sites is kept" in done.err


def test_interrupted_tuning_says_what_is_kept(invoke: Invoke, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(vars(tvmfuse), "tune", interrupted)
    done = invoke("tune", model)
    assert (done.code, "the same command again goes on from there" in done.err) == (130, True)


def test_tuning_that_leaves_sites_says_how_it_goes_on(invoke: Invoke, asked: dict, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(tvmfuse), "tune", lambda *_, **__: Summary(left=3))
    assert "the same command again goes on with what is left: 3 different sites" in invoke("tune", model).err
    assert "begun, a later run goes on with it" in invoke("tune", model).out
    told = json.loads(invoke("tune", model, "--json").out)
    assert told["left"] == 3 and told["sites"][0]["this_run"].startswith("begun")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "S"], "--shape takes NAME=N"),
        (["--shape", "=1"], "--shape takes NAME=N"),
        (["--shape", "S=big"], "--shape takes NAME=N"),
        (["--shape", "S=1", "--shape", "S=2"], "--shape is given twice for 'S'"),
        (["--input", "x"], "--input takes NAME=FILE.npy"),
        (["--input", "x=absent.npy"], "absent.npy can't be read"),
        ([], "input 'x' is missing"),
        (["--fuse", "perhaps"], "for '--fuse': 'perhaps' is not one of 'measured', 'always', 'never'; see"),
        (["--threads", "0"], "threads"),
        (["--threads"], "requires an argument; see `tvmfuse run --help`"),
    ],
)
def test_wrong_use_ends_with_2(invoke: Invoke, asked: dict, model: Path, arguments: list[str], message: str) -> None:
    done = invoke("run", model, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (saved(np.array([{}], object)), "holds Python objects, which are never unpickled"),
        (saved(np.zeros((2, 3)))[:-8], "damaged, cut short"),
        (saved(np.zeros((2, 3))).replace(b"(2, 3)", b"(2, 3 "), "damaged, cut short"),
        (b"1 2 3\n", "is not a .npy file"),
        (b"", "is not a .npy file"),
        (None, "can't be read: no such file or directory"),
    ],
)
def test_input_that_holds_no_array(invoke: Invoke, asked: dict, model: Path, tmp_path: Path, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / "x.npy").write_bytes(content)
    done = invoke("run", model, "--input", f"x={tmp_path / 'x.npy'}")
    assert (done.code, asked) == (2, {}), "nothing is built before"
    assert said in done.err and "numpy.save" in done.err
    assert "allow_pickle" not in done.err and "Errno" not in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize("target", ["haswell", "[1]"])
def test_target_is_a_json_object(invoke: Invoke, asked: dict, model: Path, tmp_path: Path, target: str) -> None:
    done = invoke("build", model, "-o", tmp_path / "a", "--target", target)
    assert (done.code, "--target takes a JSON object" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain"], "Missing argument 'MODEL'; see `tvmfuse explain --help`"),
        (["explain", "absent.onnx"], "'absent.onnx' does not exist"),
        (["explain", "m.onnx", "--fast"], "No such option: --fast"),
        (["explian", "m.onnx"], "No such command 'explian'"),
        (["build", "m.onnx"], "Missing"),
        (["--sideways"], "see `tvmfuse --help`"),
    ],
)
def test_wrong_use_is_one_line(
    invoke: Invoke, asked: dict, model: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(model.parent)
    model.rename("m.onnx")
    done = invoke(*arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert message in done.err


def test_no_command_shows_the_help(invoke: Invoke) -> None:
    done = invoke()
    assert (done.code, "explain" in done.err, "tune" in done.err) == (2, True, True)


def test_absent_model_is_wrong_use(invoke: Invoke, asked: dict) -> None:
    assert invoke("explain", "absent.onnx").code == 2


def test_an_input_given_twice_is_refused(invoke: Invoke, asked: dict, model: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 3), np.float32))
    given = ["--input", f"x={tmp_path / 'x.npy'}"]
    done = invoke("run", model, *given, *given)
    assert (done.code, "--input is given twice for 'x'" in done.err) == (2, True)


def test_an_artifact_is_known_by_its_content(invoke: Invoke, asked: dict, tmp_path: Path) -> None:
    for name in ("m.onnx", "m.bin"):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            for part in (MANIFEST, LIBRARY, WEIGHTS):
                archive.writestr(part, "")
        assert invoke("run", tmp_path / name, "--random", "0").code == 0
        assert asked.pop("load")["model"] == tmp_path / name
        refused = invoke("explain", tmp_path / name)
        assert (refused.code, "is a tvmfuse artifact, not an ONNX model" in refused.err) == (2, True)
    assert not asked


def test_another_archive_is_no_artifact(invoke: Invoke, asked: dict, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.onnx", "w") as archive:
        archive.writestr("weights", "")
    invoke("run", tmp_path / "m.onnx", "--random", "0")
    assert list(asked) == ["build"]


def test_the_model_is_not_overwritten(invoke: Invoke, asked: dict, model: Path) -> None:
    done = invoke("build", model, "-o", model)
    assert (done.code, "is the model itself" in done.err, asked) == (2, True, {})


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (["build", "m.onnx", "-o"], "compiled model"),
        (["report", "m.onnx", "-o"], "report"),
        (["check", "m.onnx", "--write", "--against"], "file of decisions"),
    ],
)
def test_what_is_of_another_kind_is_not_overwritten(
    invoke: Invoke, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], output: str
) -> None:
    """The model's weights, for one, or another model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.onnx").write_bytes(model.read_bytes())
    (tmp_path / "w.bin").write_bytes(bytes(8))
    done = invoke(*command, "w.bin")
    assert (done.code, f"is no {output}" in done.err, (tmp_path / "w.bin").read_bytes()) == (2, True, bytes(8))


@pytest.mark.parametrize("command", ["build", "explain"])
def test_a_pipe_is_no_model_and_not_waited_for(tmp_path: Path, command: str) -> None:
    os.mkfifo(tmp_path / "m.onnx")
    arguments = [command, tmp_path / "m.onnx", *(["-o", tmp_path / "a"] if command == "build" else [])]
    done = subprocess.run([sys.executable, "-m", "tvmfuse", *arguments], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "is not a file" in done.stderr) == (3, True)


def test_where_nothing_can_be_written_nothing_is_built(invoke: Invoke, asked: dict, model: Path, tmp_path: Path) -> None:
    done = invoke("build", model, "-o", tmp_path / "absent" / "a.tvmfuse")
    assert (done.code, "there is no folder" in done.err, asked) == (2, True, {})


def test_hints_are_spelled_as_options(invoke: Invoke, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, shapes: dict, **__: object) -> None:
        bind({"x": (1, "S"), "y": (None, 3)}, shapes, "model")

    monkeypatch.setitem(vars(tvmfuse), "explain", fail)
    assert invoke("explain", model).err.endswith("Bind it with the extents you will run: --shape S=1 --shape y=1,3\n")
    assert "--shape T=1 binds nothing" in invoke("explain", model, "--shape", "T=1").err
    assert "--shape z=5, binds nothing" in invoke("explain", model, "--shape", "z=5,").err


def test_a_listing_becomes_one_line(invoke: Invoke, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise errors.UnsupportedError("these can't be compiled:\n  A: why\n  B: why")

    monkeypatch.setitem(vars(tvmfuse), "explain", fail)
    assert invoke("explain", model).err == "tvmfuse: these can't be compiled: A: why; B: why\n"


def test_a_warning_is_one_line_said_once(invoke: Invoke, asked: dict, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(*_: object, **__: object) -> SimpleNamespace:
        for _ in range(2):
            warnings.warn("NaN in the weights", stacklevel=1)
        return SimpleNamespace(sites=[], refusals=[])

    monkeypatch.setitem(vars(tvmfuse), "explain", warn)
    assert invoke("explain", model).err.count("tvmfuse: warning: NaN in the weights\n") == 1


def test_outputs_go_nowhere_when_the_folder_cannot_be_made(invoke: Invoke, asked: dict, model: Path) -> None:
    done = invoke("run", model, "--random", "0", "--output", model / "below")
    assert (done.code, "can't write to" in done.err) == (2, True)


def test_shapes_read_extents_and_ranks() -> None:
    assert parse_shapes(["S=1", "x=1,3,8", "a=b=2", "v=5,"]) == {"S": 1, "x": (1, 3, 8), "a=b": 2, "v": (5,)}
