"""A script, run in a process of its own: parse and check a model file that nobody has looked at yet, within limits.

usage: examine.py MODEL MEMORY_BYTES CPU_SECONDS PATHS    (where to import from, separated as in PYTHONPATH)
Writes {"parsed": whether it is a protocol buffer of a model, "complaint": what onnx.checker says against it, or null}.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from typing import Any

FREE_WEIGHTS = 4  # the IR version since which weights needn't be inputs as well


def complaint(model: Any, path: str | None = None) -> str | None:
    """What onnx.checker says against an onnx.ModelProto, or the file that it was read from; None when nothing.

    Weights that aren't inputs as well are no fault in IR version 3 either: exporters wrote such files, and other runtimes take them.
    """
    import onnx

    inputs = {value.name for value in model.graph.input}
    source = model if path is None else path
    if model.ir_version == FREE_WEIGHTS - 1 and not all(tensor.name in inputs for tensor in model.graph.initializer):
        source = onnx.ModelProto()
        source.CopyFrom(model)
        source.ir_version = FREE_WEIGHTS
    try:
        onnx.checker.check_model(source)
    except (onnx.checker.ValidationError, ValueError) as error:
        return str(error)
    return None


def main(path: str, memory_bytes: str, cpu_seconds: str, paths: str) -> None:
    sys.path[:] = paths.split(os.pathsep)
    import onnx  # before the limits: what it takes doesn't depend on the file
    from google.protobuf.message import DecodeError

    for kind, limit in (("RLIMIT_AS", int(memory_bytes)), ("RLIMIT_CPU", int(cpu_seconds)), ("RLIMIT_FSIZE", 0), ("RLIMIT_CORE", 0)):
        with contextlib.suppress(OSError, ValueError):  # macOS has no limit of the address space
            resource.setrlimit(getattr(resource, kind), (limit, limit))
    answers = os.dup(1)
    model, parsed = onnx.ModelProto(), True
    try:
        with open(path, "rb") as file:
            model.ParseFromString(file.read())
    except DecodeError:
        parsed = False
    found = complaint(model, path) if parsed else None
    os.write(answers, json.dumps({"parsed": parsed, "complaint": found}).encode(errors="replace"))


if __name__ == "__main__":
    main(*sys.argv[1:])
