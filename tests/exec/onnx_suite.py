"""ONNX's own test suite through `tvmfuse.onnx_backend`: which tests pass, and why others are refused.

    python -m tests.exec.onnx_suite             all of it; prints the count; fails below FLOOR or when anything goes wrong
    python -m tests.exec.onnx_suite conv gru    the tests whose names hold one of these words
    python -m tests.exec.onnx_suite --results onnx.jsonl    writes each result down at once; what is there already isn't run again

Tests run in child processes: one that dies says which test killed it, and the others go on.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

WORKERS = 2
CHUNK = 60  # tests a child
FLOOR = 1526  # passed tests among ONNX's node tests
# Where ONNX's expected values carry the rounding of NumPy's float16 or FFT, and their tolerance doesn't.
TOLERANCES = {
    "test_attention_4d_causal_fp16": {"rtol": 2e-3},
    "test_attention_4d_causal_fp16_expanded": {"rtol": 2e-3},
    "test_dft_inverse": {"atol": 1e-6},
    "test_dft_inverse_opset19": {"atol": 1e-6},
}


def cases(kinds: Sequence[str] = ("Node", "Real", "Simple", "PyTorchConverted", "PyTorchOperator")) -> dict[str, Callable[[], Any]]:
    """Test name -> what runs it and raises when it fails."""
    from onnx.backend.test import BackendTest

    from tvmfuse.onnx_backend import TvmfuseBackend, TvmfuseRep

    class OneThread(TvmfuseBackend):
        @classmethod
        def is_compatible(cls, model: Any, device: str = "CPU", **_options: Any) -> bool:
            return True  # so that `prepare` says why not

        @classmethod
        def prepare(cls, model: Any, device: str = "CPU", **_tolerances: Any) -> TvmfuseRep:
            return super().prepare(model, device, threads=1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ONNX's casts overflow on purpose
        suite = BackendTest(OneThread, __name__, TOLERANCES)
    found = {}
    for name, case in suite.test_cases.items():
        if name.removeprefix("OnnxBackend").removesuffix("ModelTest") in kinds:
            found |= {
                test.removesuffix("_cpu"): getattr(case(test), test)
                for test in dir(case)
                if test.startswith("test_") and test.endswith("_cpu")
            }
    return found


def outcome(case: Callable[[], Any]) -> tuple[str, str]:
    """ "passed", "refused" with the reason, or "failed" with what went wrong."""
    from tvmfuse.errors import UnsupportedError

    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            case()
    except UnsupportedError as error:
        return "refused", str(error)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "passed", ""


def operators(refusal: str) -> set[str]:
    """What a refusal names."""
    return set(re.findall(r"^  (\S+?::\S+): ", refusal, re.MULTILINE))


def child(names: Sequence[str]) -> None:
    """Runs tests; before each its name, after each its outcome on a line of stdout."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    known = cases()
    for name in names:
        print(json.dumps(name), file=out)
        print(json.dumps(outcome(known[name])), file=out)


def run(names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Name, outcome and reason of each test as soon as it has ended, from as many children as it takes."""
    left = list(names)
    while left:
        running = None
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as errors:
            environment = {**os.environ, "TVM_NUM_THREADS": "1", "TVMFUSE_CACHE": "off", "ONNX_MODELS": folder}
            command = [sys.executable, "-m", "tests.exec.onnx_suite", "--child", *left]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as process:
                assert process.stdout is not None
                for line in map(json.loads, process.stdout):
                    if isinstance(line, str):
                        running = left.pop(0)
                    else:
                        yield running, *line
                        running = None
            errors.seek(0)
            said = errors.read().decode(errors="replace")
        if running:
            yield running, "failed", f"the process ended with {process.returncode}: {said[-500:]}"
        elif process.returncode:
            raise RuntimeError(said)


def earlier(path: Path) -> dict[str, tuple[str, str]]:
    """What a run that was cut short has written to `path`."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {name: (kind, why) for name, kind, why in map(json.loads, lines)}


def main(words: Sequence[str], path: Path | None) -> int:
    node = cases(["Node"])
    names = [name for name in cases() if not words or any(word in name for word in words)]
    results = {name: result for name, result in (earlier(path) if path else {}).items() if name in names}
    left = [name for name in names if name not in results]
    chunks = [left[start :: -(-len(left) // CHUNK)] for start in range(-(-len(left) // CHUNK))]
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool, open(path or os.devnull, "a", buffering=1) as out:

        def record(chunk: Sequence[str]) -> None:
            for name, kind, why in run(chunk):
                results[name] = kind, why
                out.write(json.dumps([name, kind, why]) + "\n")

        list(pool.map(record, chunks))
    reasons = Counter(
        line.partition(" (nodes ")[0].strip() for kind, why in results.values() if kind == "refused" for line in why.splitlines()[-1:]
    )
    for reason, count in reasons.most_common():
        print(f"{count:5} refused: {reason}")
    failures = {name: why for name, (kind, why) in results.items() if kind == "failed"}
    for name, why in failures.items():
        print(f"FAILED {name}: {why}")
    counts = {kind: sum(k == kind for k, _ in results.values()) for kind in ("passed", "refused", "failed")}
    passed = sum(results[name][0] == "passed" for name in results if name in node)
    print(f"{len(results)} tests: {counts}; {passed} of {sum(name in node for name in results)} node tests passed, the floor is {FLOOR}")
    return 1 if failures or (not words and passed < FLOOR) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(prog="python -m tests.exec.onnx_suite", description="ONNX's own test suite.")
        parser.add_argument("words", nargs="*", help="only tests whose names hold one of these")
        parser.add_argument("--results", type=Path, help="write each result to this file; what is there already isn't run again")
        given = parser.parse_args()
        sys.exit(main(given.words, given.results))
