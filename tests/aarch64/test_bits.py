"""The same bits on NEON as here: models are tuned and built over RPC for an emulated device that runs `tvmfuse serve`, and run there.

`make test-aarch64` makes the root and says where it is. Times under emulation mean nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest

import tvmfuse
from bench import models
from tvmfuse import gate, kernel
from tvmfuse.building import compile_model, plan_for, prepare
from tvmfuse.choose import Chooser, Fuse
from tvmfuse.decide.log import Log, Record
from tvmfuse.errors import DeviceLost
from tvmfuse.measure.device import Place
from tvmfuse.measure.forkserver import ForkServer
from tvmfuse.measure.host import machine, toolchain
from tvmfuse.measure.pool import Pool
from tvmfuse.measure.remote import connected, identify
from tvmfuse.measure.whole import Sample
from tvmfuse.values import NEON, Candidate, Verdict

ROOT = Path(os.environ.get("TVMFUSE_AARCH64_ROOT", ""))
START_S = 300.0  # emulated Python imports TVM in about ten seconds, beside other work in a minute
INSIDE = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": "/opt/tvmfuse:/opt/site"}

pytestmark = pytest.mark.skipif(ROOT == Path(), reason="needs an emulated AArch64 root: make test-aarch64")


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    """This package, as it is here, in the root."""
    there = ROOT / "opt" / "tvmfuse"
    shutil.rmtree(there, ignore_errors=True)
    shutil.copytree(Path(tvmfuse.__file__).parent, there / "tvmfuse", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture(autouse=True)
def linker(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM links artifacts with $CXX."""
    monkeypatch.setenv("CXX", "aarch64-linux-gnu-gcc")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def rpc() -> Iterator[str]:
    """A tracker here, and the emulated device that has registered with it."""
    tracker = free_port()
    track = ["-m", "tvm.exec.rpc_tracker", "--host", "127.0.0.1", "--port", str(tracker), "--port-end", str(tracker + 1), "--silent"]
    serve = ["-m", "tvmfuse", "serve", "--tracker", f"127.0.0.1:{tracker}", "--key", "emulated", "--port", str(free_port())]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen([sys.executable, *track], **quiet)]
    try:
        until_found(f"127.0.0.1:{tracker}/none", "has registered")
        processes.append(subprocess.Popen(["chroot", str(ROOT), "python3", *serve], env=INSIDE, **quiet))
        until_found(f"127.0.0.1:{tracker}/emulated")
        yield f"127.0.0.1:{tracker}/emulated"
    finally:
        for process in processes:
            for each in (*psutil.Process(process.pid).children(recursive=True), process):
                each.send_signal(signal.SIGKILL)
            process.wait()


def until_found(rpc: str, enough: str | None = None) -> None:
    """Wait for a device, or for an error that says `enough`."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            identify(rpc)
            return
        except DeviceLost as error:
            if enough and enough in str(error):
                return
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


def small(name: str, extent: int = 64) -> onnx.ModelProto:
    """An image classifier that averages over its image at the end, for smaller images."""
    model = models.load(name, logits=True)
    del model.graph.value_info[:]
    for axis in (2, 3):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_value = extent
    return model


def case(name: str) -> tuple[onnx.ModelProto, dict[str, int], dict[str, np.ndarray]]:
    if name.startswith("dfn3"):
        return models.load(name), models.shapes(name), models.inputs(name)
    return small(name), {}, {key: np.ascontiguousarray(x[:, :, :64, :64]) for key, x in models.inputs(name).items()}


def run_there(artifact: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`tvmfuse run` on the device."""
    folder = artifact.parent
    inside = Path("/") / folder.relative_to(ROOT)
    inputs = []
    for i, (name, array) in enumerate(feeds.items()):
        np.save(folder / f"in{i}.npy", array)
        inputs += ["--input", f"{name}={inside / f'in{i}.npy'}"]
    command = ["python3", "-m", "tvmfuse", "run", str(inside / artifact.name), *inputs, "--output", str(inside / "out")]
    ran = subprocess.run(["chroot", str(ROOT), *command], env=INSIDE, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return {path.stem: np.load(path) for path in (folder / "out").iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In the root."""
    made = ROOT / "tmp" / f"tvmfuse-{os.getpid()}-{tmp_path.name}"
    made.mkdir()
    yield made
    shutil.rmtree(made)


def assert_same_bits(built: tvmfuse.Session, name: str, folder: Path) -> None:
    model, shapes, feeds = case(name)
    here = tvmfuse.build(model, shapes, threads=1, fuse="always")
    expected = dict(zip((info.name for info in here.get_outputs()), here.run(None, feeds), strict=True))
    assert any(np.ptp(array) > 0 for array in expected.values())
    built.save(folder / "m.tvmfuse")
    found = run_there(folder / "m.tvmfuse", feeds)
    assert found.keys() == expected.keys()
    for output, wanted in expected.items():
        got = found[output]
        assert got.tobytes() == wanted.tobytes(), f"{output}: {np.count_nonzero(got != wanted)} of {got.size} elements differ"


@pytest.mark.parametrize("fuse", ["always", "never"])
@pytest.mark.parametrize("name", ["dfn3_enc_s1", "dfn3_erb_dec_s1", "dfn3_df_dec_s1", "squeezenet", "mobilenetv2"])
def test_model_has_the_bits_of_this_machine(rpc: str, name: str, fuse: Fuse, folder: Path) -> None:
    assert machine(identify(rpc).target, 1).isa == NEON
    model, shapes, _ = case(name)
    assert_same_bits(tvmfuse.build(model, shapes, threads=1, fuse=fuse, rpc=rpc), name, folder)


def test_tuned_model_has_the_bits_of_this_machine(rpc: str, folder: Path, tmp_path: Path) -> None:
    model, shapes, _ = case("dfn3_df_dec_s1")
    summary = tvmfuse.tune(model, shapes, threads=1, budget="60s", logs=tmp_path, rpc=rpc)
    assert summary.results and not any(result.failures for result in summary.results) and not summary.gate_failure
    assert_same_bits(tvmfuse.build(model, shapes, threads=1, logs=tmp_path, rpc=rpc), "dfn3_df_dec_s1", folder)


def test_model_built_from_records_alone_has_the_bits_of_this_machine(rpc: str, folder: Path, tmp_path: Path) -> None:
    model, shapes, _ = case("dfn3_df_dec_s1")
    device = identify(rpc)
    there = machine(device.target, 1, device.host)
    workload = next(site.workload for site in prepare(model, shapes).sites if site.workload.epilogue.steps)
    apart = next(c for c in kernel.candidates(workload, there) if c.placement == "separate")
    won = Verdict("wins", apart, 0.9, (0.88, 0.93), 0.001, 15, "for this test")
    conditions = Chooser("measured", there, host=device.host, toolchain=toolchain()).conditions(workload)
    Log([tmp_path]).append(Record.of(workload, won, conditions))
    built = tvmfuse.build(model, shapes, logs=tmp_path, host=device.host.key)
    assert {site.placement for site in built.sites if site.source == "measured"} == {"separate"}
    assert_same_bits(built, "dfn3_df_dec_s1", folder)


def test_whole_models_are_timed_side_by_side_there(rpc: str, tmp_path: Path) -> None:
    """Linked there, from objects; their outputs have equal bits."""
    model, shapes, _ = case("dfn3_df_dec_s1")
    with ForkServer() as server, connected(rpc, server) as places:
        plan = plan_for(None, 1, "always", None, device=places[0].identity)
        prepared = prepare(model, shapes)
        always, never = (compile_model(prepared, plan, Chooser(fuse, plan.machine)) for fuse in gate.RIVALS)
        times: list[float] = []

        def judge(sample: Sample) -> Verdict:
            times.extend(sample(slot, 1, 1) for slot in range(4))
            return Verdict("undecided", Candidate("register", 0), 1.0, (0.9, 1.1), 0.0, 15, "for this test")

        gate.OnDevice(Pool[Place](places), plan, tmp_path)(gate.side_by_side(always, [always, never]), judge)
    assert len(times) == 4 and all(seconds > 0 for seconds in times)
