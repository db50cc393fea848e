"""Seconds to build a model, first and from the cache, and the peak memory of building it and of running what was saved.

    python -m bench.footprint --models mobilenetv2 vgg19

Each step in a process of its own, on the model's .onnx file; beside it ONNX Runtime, which loads that file and runs once. Memory is the
process's peak resident set in MiB, of which an empty process that has imported TVM or ONNX Runtime is the floor.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from . import models


def build(name: str, folder: Path) -> None:
    import tvmfuse

    tvmfuse.build(folder / "model.onnx", shapes=models.shapes(name), threads=1).save(folder / "model.tvmfuse")


def run(name: str, folder: Path) -> None:
    import tvmfuse

    tvmfuse.load(folder / "model.tvmfuse").run(None, dict(np.load(folder / "feeds.npz")))


def onnxruntime(name: str, folder: Path) -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    session.run(None, dict(np.load(folder / "feeds.npz")))


STEPS = {"build": build, "again": build, "run": run, "onnxruntime": onnxruntime}


def child(step: str, name: str, folder: Path) -> dict[str, float]:
    import onnxruntime  # noqa: F401

    import tvmfuse.building  # noqa: F401

    began = time.perf_counter()
    STEPS[step](name, folder)
    return {"s": time.perf_counter() - began, "mib": peak_mib()}


def peak_mib() -> float:
    """Of this process alone: getrusage on Linux counts also what the parent held when it forked."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 2**10


def measure(name: str, steps: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        onnx.save(models.load(name), folder / "model.onnx")
        np.savez(folder / "feeds.npz", **models.inputs(name))
        environment = os.environ | {"TVMFUSE_CACHE": str(folder / "cache"), "TVM_NUM_THREADS": "1", "TVM_BIND_THREADS": "0"}
        results = {}
        for step in steps:
            command = [sys.executable, "-m", "bench.footprint", "--child", step, str(folder), "--models", name]
            results[step] = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        return results


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.footprint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=models.ZOO, default=["mobilenetv2", "densenet121", "resnet50", "vgg19"])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child[0], args.models[0], Path(args.child[1]))))
        return
    print(f"{'model':14}{'build s':>9}{'again s':>9}{'build MiB':>11}{'again MiB':>11}{'run MiB':>9}{'ORT MiB':>9}{'run/ORT':>9}")
    for name in args.models:
        r = measure(name, list(STEPS))
        print(
            f"{name:14}{r['build']['s']:9.2f}{r['again']['s']:9.2f}{r['build']['mib']:11.0f}{r['again']['mib']:11.0f}{r['run']['mib']:9.0f}"
            f"{r['onnxruntime']['mib']:9.0f}{r['run']['mib'] / r['onnxruntime']['mib']:9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
