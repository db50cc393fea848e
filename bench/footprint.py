"""Seconds to build a model, first and from the cache, the peak memory of that, and seconds and peak memory of running what was saved.

    python -m bench.footprint --models mobilenetv2 vgg19

Each step in a process of its own, on the model's .onnx file; beside it ONNX Runtime, which loads that file and runs once. Memory is the
process's peak resident set in MiB, Python and NumPy included. The seconds of a build are without imports; those of a run are the whole
process's, from its start to its end.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Each step imports what it needs itself: what the others need would count as its memory.


def build(name: str, folder: Path) -> float:
    import tvmfuse
    from tvmfuse import building  # noqa: F401

    from . import models

    began = time.perf_counter()
    tvmfuse.build(folder / "model.onnx", shapes=models.shapes(name), threads=1).save(folder / "model.tvmfuse")
    return time.perf_counter() - began


def run(name: str, folder: Path) -> None:
    import tvmfuse

    tvmfuse.load(folder / "model.tvmfuse").run(None, dict(np.load(folder / "feeds.npz")))


def onnxruntime(name: str, folder: Path) -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    session.run(None, dict(np.load(folder / "feeds.npz")))


STEPS: dict[str, Callable[[str, Path], float | None]] = {"build": build, "again": build, "run": run, "onnxruntime": onnxruntime}


def child(step: str, name: str, folder: Path) -> dict[str, float | None]:
    return {"s": STEPS[step](name, folder), "mib": peak_mib()}


def peak_mib() -> float:
    """Of this process alone: getrusage on Linux counts also what the parent held when it forked."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 2**10


def measure(name: str, steps: list[str]) -> dict[str, Any]:
    import onnx

    from . import models

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        onnx.save(models.load(name), folder / "model.onnx")
        np.savez(folder / "feeds.npz", **models.inputs(name))
        environment = os.environ | {"TVMFUSE_CACHE": str(folder / "cache"), "TVM_NUM_THREADS": "1", "TVM_BIND_THREADS": "0"}
        results = {}
        for step in steps:
            command = [sys.executable, "-m", "bench.footprint", "--child", step, str(folder), "--models", name]
            began = time.perf_counter()
            found = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
            results[step] = {**found, "s": found["s"] or time.perf_counter() - began}
        return results


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.footprint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", metavar="NAME", default=["mobilenetv2", "densenet121", "resnet50", "vgg19"])
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child[0], args.models[0], Path(args.child[1]))))
        return
    headings = ("build s", "again s", "build MiB", "again MiB", "run s", "ORT s", "run MiB", "ORT MiB", "run/ORT")
    print(f"{'model':16}" + "".join(f"{heading:>11}" for heading in headings))
    for name in args.models:
        build, again, run, ort = measure(name, list(STEPS)).values()
        cells = [build["s"], again["s"], build["mib"], again["mib"], run["s"], ort["s"], run["mib"], ort["mib"], run["mib"] / ort["mib"]]
        digits = (0 if heading.endswith("MiB") else 2 for heading in headings)
        print(f"{name:16}" + "".join(f"{cell:11.{n}f}" for cell, n in zip(cells, digits, strict=True)), flush=True)


if __name__ == "__main__":
    main()
