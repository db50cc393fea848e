"""The same bits on NEON as on this machine: models compiled for AArch64 run in an emulated root, over TVM's remote procedure calls.

`make test-aarch64` makes the root and says where it is. Times under emulation mean nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import tvm
from tvm import relax
from tvm.support.cc import cross_compiler

import tvmfuse
from bench import models
from tvmfuse.choose import Fuse
from tvmfuse.measure.host import machine, parse_target
from tvmfuse.model.load import load
from tvmfuse.values import NEON

ROOT = os.environ.get("TVMFUSE_AARCH64_ROOT", "")
TARGET = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a76"}
START_S = 120.0  # emulated Python imports TVM in about ten seconds

pytestmark = pytest.mark.skipif(not ROOT, reason="needs an emulated AArch64 root: make test-aarch64")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a server in the emulated root."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": "/opt/site", "TVM_NUM_THREADS": "1", "TVM_BIND_THREADS": "0"}
    server = subprocess.Popen(
        ["chroot", ROOT, "python3", "-m", "tvm.exec.rpc_server", "--host", "127.0.0.1", "--port", str(port), "--port-end", str(port + 1)],
        env=environment, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield port
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="module")
def device(port: int) -> tvm.rpc.RPCSession:
    """One connection for all: the server takes the next one only when this has ended."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            return tvm.rpc.connect("127.0.0.1", port, session_timeout=600)
        except RuntimeError:
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


def cases() -> Iterator[tuple[str, onnx.ModelProto, dict[str, int], dict[str, np.ndarray]]]:
    for part in ("enc", "erb_dec", "df_dec"):
        name = f"dfn3_{part}_s1"
        yield name, models.load(name), models.shapes(name), models.inputs(name)
    for name in ("squeezenet", "mobilenetv2"):
        yield name, small(name), {}, {key: np.ascontiguousarray(x[:, :, :64, :64]) for key, x in models.inputs(name).items()}


def remote_run(device: tvm.rpc.RPCSession, library: Path, feeds: list[np.ndarray]) -> list[np.ndarray]:
    device.upload(str(library))
    vm = relax.VirtualMachine(device.load_module(library.name), device.cpu())
    vm.set_input("main", *(tvm.runtime.tensor(array, device.cpu()) for array in feeds))
    vm.invoke_stateful("main")
    outputs = vm.get_outputs("main")
    return [output.numpy() for output in (outputs if isinstance(outputs, list | tuple) else [outputs])]


@pytest.mark.parametrize("fuse", ["always", "never"])
@pytest.mark.parametrize("name", ["dfn3_enc_s1", "dfn3_erb_dec_s1", "dfn3_df_dec_s1", "squeezenet", "mobilenetv2"])
def test_model_has_the_bits_of_this_machine(device: tvm.rpc.RPCSession, name: str, fuse: Fuse, tmp_path: Path) -> None:
    model, shapes, feeds = next(rest for case, *rest in cases() if case == name)
    here = tvmfuse.build(model, shapes, threads=1, fuse="always")
    expected = here.run(None, feeds)
    assert any(np.ptp(array) > 0 for array in expected)

    assert machine(parse_target(TARGET), 1).isa == NEON
    compiled = tvm.compile(load(model, shapes).mod, tvm.target.Target(TARGET), relax_pipeline=tvmfuse.pipeline(TARGET, fuse=fuse))
    library = tmp_path / f"{name}_{fuse}.so"  # the device loads a name but once
    compiled.export_library(str(library), fcompile=cross_compiler("aarch64-linux-gnu-gcc"))
    found = remote_run(device, library, [feeds[info.name] for info in here.get_inputs()])
    for info, got, wanted in zip(here.get_outputs(), found, expected, strict=True):
        assert got.tobytes() == wanted.tobytes(), f"{info.name}: {np.count_nonzero(got != wanted)} of {got.size} elements differ"
