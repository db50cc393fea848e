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


def main(path: str, memory_bytes: str, cpu_seconds: str, paths: str) -> None:
    sys.path[:] = paths.split(os.pathsep)
    import onnx  # before the limits: what it takes doesn't depend on the file
    from google.protobuf.message import DecodeError

    for kind, limit in (("RLIMIT_AS", int(memory_bytes)), ("RLIMIT_CPU", int(cpu_seconds)), ("RLIMIT_FSIZE", 0), ("RLIMIT_CORE", 0)):
        with contextlib.suppress(OSError, ValueError):  # macOS has no limit of the address space
            resource.setrlimit(getattr(resource, kind), (limit, limit))
    answers = os.dup(1)
    parsed, complaint = True, None
    try:
        with open(path, "rb") as file:
            onnx.ModelProto().ParseFromString(file.read())
        onnx.checker.check_model(path)
    except DecodeError:
        parsed = False
    except (onnx.checker.ValidationError, ValueError) as error:
        complaint = str(error)
    os.write(answers, json.dumps({"parsed": parsed, "complaint": complaint}).encode(errors="replace"))


if __name__ == "__main__":
    main(*sys.argv[1:])
