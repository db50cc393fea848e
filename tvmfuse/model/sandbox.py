"""A model file is first parsed in a child with limits of memory and time; this process touches only what that survived."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from ..errors import ModelError
from . import examine as script

# A sound model takes some four times its size: the file, its message here and in the checker, and copies of strings. Millions of empty
# messages, of two bytes each, would take hundreds of times theirs.
MEMORY_BYTES, MEMORY_FACTOR = 2 << 30, 8
CPU_SECONDS, BYTES_PER_CPU_SECOND = 20, 20_000_000
WAIT_FACTOR = 10  # of wall clock, on a busy machine


def examine(path: Path) -> str | None:
    """What onnx.checker says against a model file; None when nothing.

    Raises ModelError when the file can't be parsed, crashes the parser, or takes more memory or time than its size explains.
    """
    size = path.stat().st_size
    memory, seconds = MEMORY_BYTES + MEMORY_FACTOR * size, CPU_SECONDS + size // BYTES_PER_CPU_SECOND
    command = [sys.executable, "-I", script.__file__, os.fspath(path.resolve()), str(memory), str(seconds), os.pathsep.join(sys.path)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # each of its threads reserves address space
    try:
        child = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=WAIT_FACTOR * seconds)
    except subprocess.TimeoutExpired:
        raise ModelError(f"{path} is no sound model: to check its {size} bytes took longer than {WAIT_FACTOR * seconds} s") from None
    if child.returncode:
        raise ModelError(f"{path} is no sound model: to check its {size} bytes {_cause(child, memory, seconds)}")
    verdict = json.loads(child.stdout)
    if not verdict["parsed"]:
        raise ModelError(f"{path} ({size} bytes) is truncated, damaged or not ONNX; copy or download it again")
    return verdict["complaint"]


def _cause(child: subprocess.CompletedProcess[bytes], memory: int, seconds: int) -> str:
    last = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if last.startswith("MemoryError") or "bad_alloc" in last:
        return f"took more than {memory >> 20} MiB"
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"took longer than {seconds} s of a processor"
    if child.returncode < 0:
        return f"ended its process with {signal.Signals(-child.returncode).name}"
    return f"failed: {last}"
