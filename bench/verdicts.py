"""The decision rule on this machine: a candidate that equals its default must never win, one that is a tenth quicker nearly always.

    python -m bench.verdicts                 # equal kernels
    python -m bench.verdicts --gain          # the candidate makes 9 launches where the default makes 10
    python -m bench.verdicts --burn          # while another process keeps a second core busy

Every candidate is one try; candidates are tuned eight at a time, each time in fresh processes, as sites are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from tvmfuse import kernel
from tvmfuse.building import plan_for
from tvmfuse.decide.log import Conditions, Log
from tvmfuse.decide.search import tune_site
from tvmfuse.kernel.family import Kernel
from tvmfuse.measure.device import LocalDevice
from tvmfuse.measure.host import host, toolchain
from tvmfuse.values import Candidate, Epilogue, Machine, Matmul, Operand, Step, Workload

TOGETHER = 8
LAUNCHES = 10
BIAS_RELU = Epilogue((Step("add", ("%0", "$0")), Step("relu", ("%1",))), (Operand((256,), (1,), constant=True),))
WORKLOAD = Workload(Matmul(1, 8, 256, 256, "mk", "kn", "mn"), BIAS_RELU)


def outcomes(tries: int, gain: bool) -> Counter[str]:
    """How many of `tries` candidates came to each outcome."""
    plan = plan_for(None, 1, "always", None)
    default = kernel.candidates(WORKLOAD, plan.machine)[0]

    def build(workload: Workload, candidate: Candidate, machine: Machine) -> Kernel:
        """The same kernel whatever the candidate is called, launched LAUNCHES times, or once less."""
        built = kernel.build_kernel(workload, default, machine)
        return replace(built, launches=built.launches * (LAUNCHES - (gain and candidate != default)))

    conditions = Conditions(host(), 1, toolchain(), kernel.digest(WORKLOAD, plan.machine))
    found: Counter[str] = Counter()
    while found.total() < tries:
        twins = [Candidate("register", 10 + i, default.knobs) for i in range(min(TOGETHER, tries - found.total()))]
        with (
            tempfile.TemporaryDirectory() as folder,
            LocalDevice(build, plan.target, plan.machine, working_set=0) as device,
        ):
            result = tune_site(WORKLOAD, [default, *twins], device, Log([folder]), conditions, seed=found.total())
        found.update(verdict.outcome for verdict in result.verdicts)
        print(dict(found), file=sys.stderr)
    return found


@contextlib.contextmanager
def burning() -> Iterator[None]:
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        burner.kill()
        burner.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.verdicts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--gain", action="store_true", help="the candidate is a tenth quicker")
    parser.add_argument("--burn", action="store_true", help="keep another core busy meanwhile")
    args = parser.parse_args()
    with burning() if args.burn else contextlib.nullcontext():
        found = outcomes(args.tries, args.gain)
    print(json.dumps({"tries": args.tries, "gain": args.gain, "burn": args.burn, **found}))


if __name__ == "__main__":
    main()
