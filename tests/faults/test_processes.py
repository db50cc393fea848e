"""What is left when a tuning run or a part of it is killed: nothing, and no candidate is blamed for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tvmfuse.errors import DeviceError, DeviceLost
from tvmfuse.measure.forkserver import ForkServer

# A run one of whose processes hangs: opening a FIFO that nobody writes doesn't return, and nothing looks at the connection meanwhile.
HANGING = """
import json, sys, threading, time
from tvmfuse.measure.forkserver import ForkServer

with ForkServer() as server:
    hanging, idle = server.start(1), server.start(1)
    threading.Thread(target=hanging.ask, args=("compile", 600), kwargs=dict(module=sys.argv[1], library=""), daemon=True).start()
    idle.ask("open", 60, streamed=0, threads=1, seed=0)
    print(json.dumps([server._process.pid, hanging.pid, idle.pid]), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with ForkServer() as entered:
        yield entered


def gone(pids: list[int], within_s: float = 20.0) -> list[int]:
    """Those that are still there after a while; a zombie that only waits to be reaped is gone."""
    deadline = time.monotonic() + within_s
    while pids and time.monotonic() < deadline:
        pids = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.05)
    return pids


def start_hanging(fifo: Path) -> tuple[subprocess.Popen[str], list[int]]:
    os.mkfifo(fifo)
    run = subprocess.Popen([sys.executable, "-c", HANGING, fifo], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout is not None
    return run, json.loads(run.stdout.readline())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_parent_leaves_no_process_even_if_a_kernel_hangs(how: signal.Signals, tmp_path: Path) -> None:
    run, pids = start_hanging(tmp_path / "module")
    assert gone(pids, 0.2) == pids
    run.send_signal(how)
    run.wait(20)
    assert gone(pids) == []


# One runtime that is loading, from a FIFO that nobody writes, and one that is stopped since it isn't its turn.
BENCHING = """
import json, sys, threading, time
from tvmfuse.errors import DeviceError
from tvmfuse.peers.process import Process

if __name__ == "__main__":
    with Process("onnxruntime", sys.argv[1], {}, ()) as busy, Process("onnxruntime", "nowhere.onnx", {}, ()) as stopped:
        try:
            stopped.load()
        except DeviceError:
            pass
        threading.Thread(target=busy.load, daemon=True).start()
        time.sleep(1)
        print(json.dumps([busy.pid, stopped.pid]), flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_bench_leaves_no_runtime(how: signal.Signals, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.onnx")
    script = tmp_path / "benching.py"
    script.write_text(BENCHING)
    run = subprocess.Popen([sys.executable, script, tmp_path / "model.onnx"], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert run.stdout is not None
    pids = json.loads(run.stdout.readline())
    assert gone(pids, 0.2) == pids
    assert psutil.Process(pids[1]).status() == psutil.STATUS_STOPPED
    run.send_signal(how)
    run.wait(20)
    assert gone(pids) == []


def test_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C reaches every process of the terminal's group."""
    run, pids = start_hanging(tmp_path / "module")
    os.killpg(run.pid, signal.SIGINT)
    run.wait(20)
    assert gone(pids) == []


def test_interrupt_is_for_the_parent_to_decide_on(server: ForkServer) -> None:
    """Ctrl-C reaches these processes too; whoever catches it may still want them."""
    worker = server.start(1)
    for pid in (worker.pid, server._process.pid):
        os.kill(pid, signal.SIGINT)
    worker.ask("open", 60, streamed=0, threads=1, seed=0)
    assert server.start(1).alive


def test_dead_worker_says_how_it_died_and_others_start(server: ForkServer) -> None:
    first = server.start(1)
    os.kill(first.pid, signal.SIGSEGV)
    with pytest.raises(DeviceError, match="the process died: SIGSEGV"):
        first.ask("open", 10, streamed=0, threads=1, seed=0)
    assert not first.alive
    for _ in range(2):
        with pytest.raises(DeviceError, match="the process is gone"):
            first.ask("open", 10, streamed=0, threads=1, seed=0)
        first.close()
    with pytest.raises(DeviceError, match="AttributeError"):
        server.start(1).ask("nonsense", 10)


def test_dead_server_is_a_lost_device_not_a_failed_candidate(server: ForkServer) -> None:
    server.start(1)
    server._process.kill()
    with pytest.raises(DeviceLost, match="the process that starts measuring processes"):
        server.start(1)


def test_a_worker_that_hangs_is_killed_when_its_time_is_over(server: ForkServer, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "module")
    worker = server.start(1)
    with pytest.raises(DeviceError, match="no answer within 1 s"):
        worker.ask("compile", 1, module=str(tmp_path / "module"), library="")
    assert gone([worker.pid]) == []


def test_processes_differ_in_where_their_buffers_lie(server: ForkServer) -> None:
    """Else three fresh processes would be one, as far as placement in caches goes."""
    large = set()
    for _ in range(4):
        worker = server.start(1)
        worker.ask("open", 10, streamed=1 << 22, threads=1, seed=0)
        large.add(
            frozenset(m.addr for m in psutil.Process(worker.pid).memory_maps(grouped=False) if m.path == "[anon]" and m.rss >= 1 << 22)
        )
    assert len(large) == 4 and frozenset() not in large
