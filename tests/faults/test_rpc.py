"""Devices over RPC on loopback: TVM's tracker, our servers and TVM's own, and what happens when they die or aren't there."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pytest
import tvm.rpc
from tvm.target.codegen import llvm_get_system_cpu

import tvmfuse
from tests import small_models
from tvmfuse import gate, tuning
from tvmfuse.building import plan_for
from tvmfuse.decide import search
from tvmfuse.decide.log import Log
from tvmfuse.errors import DeviceError, DeviceLost, UsageError
from tvmfuse.measure import forkserver, remote
from tvmfuse.measure.device import Place
from tvmfuse.measure.forkserver import ForkServer
from tvmfuse.measure.host import host
from tvmfuse.measure.pool import Pool
from tvmfuse.measure.relay import StockBench
from tvmfuse.measure.whole import Sample, stored_bytes

STARTED_WITHIN_S = 60


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    return small_models.one_layer()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def listening(port: int) -> list[str]:
    """Arguments of TVM's own servers, which look for a free port among some."""
    return ["--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1), "--silent"]


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """As when a device's plug is pulled."""
    with contextlib.suppress(psutil.NoSuchProcess):
        tree = psutil.Process(process.pid)
        for each in [tree, *tree.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


@contextlib.contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        kill_tree(process)


@pytest.fixture(scope="module")
def tracker() -> Iterator[int]:
    port = free_port()
    with running("tvm.exec.rpc_tracker", *listening(port)) as process:
        until(lambda: process.poll() is not None or keys(port) == [])
        assert process.poll() is None, "the tracker ended"
        yield port


def keys(tracker: int) -> list[str] | None:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", tracker), 1).close()
        return [info["key"].removeprefix("server:") for info in tvm.rpc.connect_tracker("127.0.0.1", tracker).summary()["server_info"]]
    return None


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + STARTED_WITHIN_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@contextlib.contextmanager
def served(tracker: int, key: str, count: int = 1) -> Iterator[list[subprocess.Popen[bytes]]]:
    at = f"127.0.0.1:{tracker}"
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(serving("--tracker", at, "--key", key, "--port", str(free_port()))) for _ in range(count)]
        until(lambda: (keys(tracker) or []).count(key) == count)
        yield processes


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", "from tvmfuse.cli import main; main()", "serve", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        kill_tree(process)


class Enough(Exception):
    """Ends a tuning run from within."""


def enough() -> None:
    raise Enough


def when_measured(monkeypatch: pytest.MonkeyPatch, *steps: Callable[[], object]) -> None:
    """Take the next step each time that the pairs of a process have been written."""
    append, left = Log.append, list(steps)

    def spying(self: Log, *records: Any) -> None:
        append(self, *records)
        if left and any(len(record.times_s) > 1 for record in records):
            left.pop(0)()

    monkeypatch.setattr(Log, "append", spying)


def tuned(model: onnx.ModelProto, tracker: int, key: str, logs: Path, budget: str = "60s") -> Any:
    return tvmfuse.tune(model, threads=1, budget=budget, logs=logs, rpc=f"127.0.0.1:{tracker}/{key}")


def measured(logs: Path) -> list[float]:
    """The first time of each series of pairs in the log."""
    return [record.times_s[0] for record in Log([logs]).records() if len(record.times_s) > 1]


def blamed(logs: Path) -> list[str]:
    """Errors of candidates in the log."""
    return [record.error for record in Log([logs]).records() if record.error]


def test_device_is_waited_for_identified_measured_and_built_for(
    model: onnx.ModelProto, tracker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = [0.0]

    @contextlib.contextmanager
    def after_an_hour(*arguments: Any) -> Iterator[list[remote.RemotePlace]]:
        with remote.connected(*arguments) as places:
            waited[0] = 3600.0
            yield places

    monkeypatch.setattr(tuning, "connected", after_an_hour)
    monkeypatch.setattr(tuning, "time", types.SimpleNamespace(monotonic=lambda: time.monotonic() + waited[0]))
    with served(tracker, "whole"):
        summary = tuned(model, tracker, "whole", tmp_path, budget="20s")
        assert summary.results and not blamed(tmp_path)
        # Loopback: the device is this machine
        assert [path.name for path in tmp_path.glob("*.jsonl")] == [f"{host().key}.jsonl"]
        session = tvmfuse.build(model, threads=1, logs=tmp_path, rpc=f"127.0.0.1:{tracker}/whole")
        assert session.sites == summary.sites
    x = np.random.default_rng(1).standard_normal((8, 32)).astype(np.float32)
    always = tvmfuse.build(model, threads=1, fuse="always").run(None, {"x": x})
    assert session.run(None, {"x": x})[0].tobytes() == always[0].tobytes()


@pytest.fixture(scope="module")
def sessions(model: onnx.ModelProto) -> list[tvmfuse.Session]:
    """Side by side, for the gate."""
    always, never = (tvmfuse.build(model, threads=1, fuse=fuse) for fuse in gate.RIVALS)
    return gate.side_by_side(always, [always, never])


@contextlib.contextmanager
def comparing(rpc: str, folder: Path) -> Iterator[tuple[gate.OnDevice, Pool[Place]]]:
    with ForkServer() as server, remote.connected(rpc, server) as places:
        pool = Pool[Place](places)
        yield gate.OnDevice(pool, plan_for(None, 1, "always", None, device=places[0].identity), folder), pool


FOUND = gate.Comparison("always", 1.0, (0.9, 1.1), 0.001, 15)


def every_slot(sample: Sample) -> gate.Comparison:
    assert all(sample(slot, 2, 2) > 0 for slot in range(4))
    return FOUND


def test_whole_model_is_compared_on_a_device(
    model: onnx.ModelProto, sessions: list[tvmfuse.Session], tracker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gated(prepared: Any, plan: Any, log: Log, results: Any, trial: gate.Trial, *_: Any) -> gate.Passage:
        return gate.Passage(trial(sessions, every_slot))

    monkeypatch.setattr(tuning, "revert_while_slower", gated)
    monkeypatch.setattr(search, "spend", lambda demands, seconds, tune_one: ([], demands))
    with served(tracker, "gated"):
        assert tuned(model, tracker, "gated", tmp_path).gate is FOUND


def test_comparison_moves_to_another_device_when_its_own_dies_and_ends_with_the_last(
    sessions: list[tvmfuse.Session], tracker: int, tmp_path: Path
) -> None:
    begun: list[float] = []

    with served(tracker, "gates", 2) as devices, comparing(f"127.0.0.1:{tracker}/gates", tmp_path) as (compare, pool):

        def survives(sample: Sample) -> gate.Comparison:
            begun.append(sample(0, 1, 1))
            if len(begun) == 1:
                kill_tree(devices[0])
            return every_slot(sample)

        # Whichever of the two it has begun on
        assert compare(sessions, survives) is FOUND and len(begun) - 1 == len(pool.lost) <= 1

        def dies(sample: Sample) -> gate.Comparison:
            kill_tree(devices[1])
            return every_slot(sample)

        with pytest.raises(DeviceLost, match="/gates"):
            compare(sessions, dies)


def test_models_run_on_a_stock_server_too(sessions: list[tvmfuse.Session], tracker: int, tmp_path: Path) -> None:
    at = f"127.0.0.1:{tracker}"
    with running("tvm.exec.rpc_server", *listening(free_port()), "--tracker", at, "--key", "plain"):
        until(lambda: "plain" in (keys(tracker) or []))
        with comparing(f"{at}/plain", tmp_path) as (compare, _):
            assert compare(sessions, every_slot) is FOUND
            library, weights = next(tmp_path.glob("*.so")), [stored_bytes(weight, tmp_path) for weight in sessions[0].program.weights]
        until(lambda: free(tracker, "plain") == 1)
        device = tvm.rpc.connect_tracker("127.0.0.1", tracker).request("plain")
        device.upload(str(library), "model.so")
        bench = StockBench(device)
        manifest = sessions[0].manifest
        inputs, outputs = ([(info.shape, info.dtype) for info in infos] for infos in (manifest.inputs, manifest.outputs))
        views, held = [asdict(view) for view in manifest.views], [[str(path), digest] for path, digest in weights]
        assert bench.load_model(0, "model.so", inputs, outputs, held, views, manifest.workspace) == 0
        x, y = (memory.array for memory in bench.slots[0].buffers[:2])
        assert sessions[0].run(None, {"x": x})[0].tobytes() == y.tobytes() and np.ptp(y) > 0


def test_tuning_goes_on_when_one_of_two_devices_dies(
    model: onnx.ModelProto, tracker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tracker, "two", 2) as devices:
        with ForkServer() as server, remote.connected(f"127.0.0.1:{tracker}/two", server) as places:
            assert len(places) == 2 and places[0].identity.host == host()
        until(lambda: free(tracker, "two") == 2)
        lost, lose = [], Pool.lose
        monkeypatch.setattr(Pool, "lose", lambda pool, place, loss: (lost.append(str(loss)), lose(pool, place, loss)))
        # Devices take turns: of the next two processes one starts on the dead one
        when_measured(monkeypatch, lambda: kill_tree(devices[0]), lambda: None, enough)
        with pytest.raises(Enough):
            tuned(model, tracker, "two", tmp_path)
    assert len(lost) == 1 and "/two" in lost[0] and not blamed(tmp_path)


def test_device_with_another_cpu_than_the_first_is_not_measured_on(tracker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steppings, of = itertools.count(), remote.Identity.of

    def each_its_own(said: Any) -> remote.Identity:
        identity = of(said)
        return replace(identity, host=replace(identity.host, stepping=next(steppings)))

    with served(tracker, "mixed", 2), ForkServer() as server:
        monkeypatch.setattr(remote.Identity, "of", each_its_own)
        with remote.connected(f"127.0.0.1:{tracker}/mixed", server) as places:
            assert len(places) == 1 and next(steppings) == 2
        monkeypatch.undo()
        with remote.connected(f"127.0.0.1:{tracker}/mixed", server) as places:
            assert len(places) == 2


def free(tracker: int, key: str) -> int:
    return int(tvm.rpc.connect_tracker("127.0.0.1", tracker).summary()["queue_info"].get(key, {"free": 0})["free"])


def test_no_device_left_is_an_error_and_keeps_what_was_measured(
    model: onnx.ModelProto, tracker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tracker, "mortal") as devices:
        when_measured(monkeypatch, lambda: kill_tree(devices[0]))
        with pytest.raises(DeviceLost, match="device 0 of 127.0.0.1:.*/mortal") as raised:
            tuned(model, tracker, "mortal", tmp_path)
    assert raised.value.exit_code == 7
    assert measured(tmp_path) and not blamed(tmp_path)


def test_missing_linker_is_told_before_anything_is_sent(
    model: onnx.ModelProto, tracker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "nowhere-g++")
    with served(tracker, "unlinked"), pytest.raises(UsageError, match="names nowhere-g.., which is not there to link with"):
        tuned(model, tracker, "unlinked", tmp_path)
    assert not list(tmp_path.iterdir())


def test_absent_key_is_told_at_once(model: onnx.ModelProto, tracker: int, tmp_path: Path) -> None:
    """TVM itself would wait for ever."""
    with pytest.raises(DeviceLost, match="no device has registered as 'nosuch'"):
        tuned(model, tracker, "nosuch", tmp_path)


def test_device_that_somebody_else_holds_is_waited_for_but_not_for_ever(tracker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ACQUIRE_TIMEOUT_S", 2.0)
    rpc = f"127.0.0.1:{tracker}/held"
    with served(tracker, "held"), ForkServer() as server:
        with remote.connected(rpc, server):
            with pytest.raises(DeviceLost, match="is to be had: no answer within 2 s"), remote.connected(rpc, server):
                pass
        monkeypatch.undo()
        with remote.connected(rpc, server) as places:
            assert places[0].identity.complete


def test_slow_device_has_the_time_to_start_that_it_gives_itself(tracker: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small board imports TVM for a minute before its first process starts; a device that is gone answers nothing."""
    asked: list[float] = []
    with served(tracker, "slow"), ForkServer() as server, remote.connected(f"127.0.0.1:{tracker}/slow", server) as (place,):
        call = place.call

        def spying(do: str, timeout_s: float, **arguments: Any) -> Any:
            asked.append(timeout_s)
            return call(do, timeout_s, **arguments)

        monkeypatch.setattr(place, "call", spying)
        assert place.start(1).alive
    assert asked[0] > forkserver.START_TIMEOUT_S >= 120


def test_absent_tracker_is_told(model: onnx.ModelProto, tmp_path: Path) -> None:
    with pytest.raises(DeviceLost, match="no RPC tracker at 127.0.0.1:.*refused"):
        tuned(model, free_port(), "any", tmp_path)


@pytest.mark.parametrize("rpc", ["", "host", "host/key", "host:port/key", "host:99999/key", "host:9190", "host:9190/"])
def test_address_that_makes_no_sense(rpc: str) -> None:
    with pytest.raises(UsageError, match="write it like '127.0.0.1:9190/pi4'"):
        remote.parse_rpc(rpc)


def test_kernel_that_crashes_on_a_device_is_a_failed_candidate(tracker: int) -> None:
    with (
        served(tracker, "sturdy") as (device,),
        ForkServer() as server,
        remote.connected(f"127.0.0.1:{tracker}/sturdy", server) as (place,),
    ):
        runner = place.start(1)
        with pytest.raises(DeviceError, match="AttributeError"):
            runner.ask("nonsense", 30)
        assert runner.alive
        (process,) = [
            p for p in psutil.Process(device.pid).children(recursive=True) if "forkserver" in str(p.cmdline()) and not p.children()
        ]
        process.send_signal(signal.SIGSEGV)
        with pytest.raises(DeviceError, match="the process died: SIGSEGV"):
            runner.ask("time", 30, slot=0)
        assert not runner.alive and place.start(1).alive


def test_stock_server_is_measured_on_by_what_it_offers(
    model: onnx.ModelProto, tracker: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = f"127.0.0.1:{tracker}"
    stock = running("tvm.exec.rpc_server", *listening(free_port()), "--tracker", at, "--key", "stock")
    with stock:
        until(lambda: "stock" in (keys(tracker) or []))
        when_measured(monkeypatch, enough)
        with pytest.raises(Enough):
            tuned(model, tracker, "stock", tmp_path)
    assert not blamed(tmp_path)
    (record, *_) = Log([tmp_path]).records()
    assert (record.conditions.host.family, record.conditions.host.name) == (0, llvm_get_system_cpu())


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_server_ends_without_leaving_a_process(how: signal.Signals, tracker: int) -> None:
    with served(tracker, f"ends{how}") as (device,), ForkServer() as server:
        with remote.connected(f"127.0.0.1:{tracker}/ends{how}", server) as (place,):
            place.start(1)
            tree = psutil.Process(device.pid).children(recursive=True)
            assert len(tree) >= 3
            device.send_signal(how)
            assert device.wait(30) == 130
            assert not psutil.wait_procs(tree, 20)[1]
    assert device.stderr is not None
    said = device.stderr.read().decode()
    assert "127.0.0.1" in said and "Traceback" not in said


def test_server_listens_on_loopback_unless_told_otherwise(tracker: int) -> None:
    with served(tracker, "loopback") as (device,):
        listening = {c.laddr.ip for c in psutil.Process(device.pid).net_connections() if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}


def test_server_without_its_tracker_says_so() -> None:
    with serving("--tracker", f"127.0.0.1:{free_port()}") as device:
        assert device.wait(60) == 7 and device.stderr is not None
        assert b"no RPC tracker at" in device.stderr.read()
