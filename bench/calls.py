"""What a call costs beside the model: `session.run` on NumPy arrays and `session.bind`, against the virtual machine called from C++.

    python -m bench.calls --models dfn3_enc_s1 --threads 1

Microseconds, the least of several rounds, the three ways interleaved. To be run on a machine that does little else.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numpy as np

from . import models

ROUNDS = 40
ROUND_S = 5e-3


def least_us(ways: dict[str, Callable[[int], float]]) -> dict[str, float]:
    """ways: how to make a number of calls, and how many seconds one took."""
    number = max(1, round(ROUND_S / min(way(3) for way in ways.values())))
    rounds = [{name: way(number) for name, way in ways.items()} for _ in range(ROUNDS)]
    return {name: 1e6 * min(taken[name] for taken in rounds) for name in ways}


def _timed(call: Callable[[], object]) -> Callable[[int], float]:
    def way(number: int) -> float:
        began = time.perf_counter()
        for _ in range(number):
            call()
        return (time.perf_counter() - began) / number

    return way


def measure(name: str, threads: int) -> tuple[int, dict[str, float]]:
    """Tensors that go in and out, and the microseconds of each way to call."""
    import tvm

    import tvmfuse
    from tvmfuse.runtime import virtual_machine
    from tvmfuse.session import bound_function

    session = tvmfuse.build(models.load(name), shapes=models.shapes(name), threads=threads)
    feeds = models.inputs(name)
    outputs = {info.name: np.empty(info.shape, info.dtype) for info in session.get_outputs()}
    vm = virtual_machine(session.program.module)
    bound = bound_function(session.program, vm, "main", [*(feeds[info.name] for info in session.get_inputs()), *outputs.values()])
    ways = {
        "own": lambda number: vm.time_evaluator("call", tvm.cpu(), number=number)().mean,
        "bind": _timed(bound),  # what `session.bind` returns; another one's workspace would lie elsewhere, which takes more than a call
        "run": _timed(lambda: session.run(None, feeds)),
    }
    return len(feeds) + len(outputs), least_us(ways)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.calls", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=models.ZOO, default=["dfn3_enc_s1", "dfn3_erb_dec_s1", "dfn3_df_dec_s1"])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    print(f"{'model':18}{'tensors':>8}{'own us':>10}{'bind adds':>11}{'run adds':>10}{'allowed':>9}")
    for name in args.models:
        tensors, us = measure(name, args.threads)
        print(
            f"{name:18}{tensors:8}{us['own']:10.2f}{us['bind'] - us['own']:11.2f}{us['run'] - us['own']:10.2f}{3 + tensors / 2:9.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
