"""The decision rule on this machine: a candidate that equals its default must never win, one that is a tenth quicker nearly always.

    python -m bench.verdicts                 # equal kernels
    python -m bench.verdicts --gain          # the candidate makes 9 launches where the default makes 10
    python -m bench.verdicts --burn          # while another process keeps a second core busy
    python -m bench.verdicts --record tries.jsonl --seconds 60   # some of them; again goes on, until there are --tries in all

Every candidate is one try; candidates are tuned eight at a time, each time in fresh processes, as sites are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tvmfuse import kernel
from tvmfuse.building import plan_for
from tvmfuse.decide.log import Log
from tvmfuse.decide.search import tune_site
from tvmfuse.kernel.family import Kernel
from tvmfuse.measure.device import LocalDevice
from tvmfuse.values import Candidate, Epilogue, Machine, Matmul, Operand, Step, Workload

TOGETHER = 8
LAUNCHES = 10
BIAS_RELU = Epilogue((Step("add", ("%0", "$0")), Step("relu", ("%1",))), (Operand((256,), (1,), constant=True),))
WORKLOAD = Workload(Matmul(1, 8, 256, 256, "mk", "kn", "mn"), BIAS_RELU)


def outcomes(tries: int, gain: bool, begin: int = 0, seconds: float = math.inf) -> Iterator[Counter[str]]:
    """How many candidates came to each outcome, those that are tuned together at a time; from try `begin` on, `tries` in all.

    seconds  after which none are begun that would take longer than the last ones did.
    """
    plan = plan_for(None, 1, "always", None)
    default = kernel.candidates(WORKLOAD, plan.machine)[0]

    def build(workload: Workload, candidate: Candidate, machine: Machine) -> Kernel:
        """The same kernel whatever the candidate is called, launched LAUNCHES times, or once less."""
        built = kernel.build_kernel(workload, default, machine)
        return replace(built, launches=built.launches * (LAUNCHES - (gain and candidate != default)))

    conditions = plan.chooser.conditions(WORKLOAD)
    end, took_s, done = time.monotonic() + seconds, 0.0, begin
    while done < tries and (began := time.monotonic()) + took_s <= end:
        twins = [Candidate("register", 10 + i, default.knobs) for i in range(min(TOGETHER, tries - done))]
        with (
            tempfile.TemporaryDirectory() as folder,
            LocalDevice(build, plan.target, plan.machine, working_set=0) as device,
        ):
            result = tune_site(WORKLOAD, [default, *twins], device, Log([folder]), conditions, seed=done)
        yield Counter(verdict.outcome for verdict in result.verdicts)
        done += len(result.verdicts)
        took_s = time.monotonic() - began


def recorded(path: Path | None, what: Mapping[str, bool]) -> Counter[str]:
    """The outcomes of earlier runs of the same kind; one line of JSON for the candidates that were tuned together."""
    lines = map(json.loads, path.read_text().splitlines() if path and path.exists() else ())
    return sum((Counter(line["outcomes"]) for line in lines if {name: line[name] for name in what} == what), Counter())


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
    parser.add_argument("--tries", type=int, default=200, help="in all, with those that are recorded")
    parser.add_argument("--gain", action="store_true", help="the candidate is a tenth quicker")
    parser.add_argument("--burn", action="store_true", help="keep another core busy meanwhile")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add the outcomes to this file, and go on from those that it holds")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing that would end later than that")
    args = parser.parse_args()
    what = {"gain": args.gain, "burn": args.burn}
    found = recorded(args.record, what)
    with burning() if args.burn else contextlib.nullcontext():
        for new in outcomes(args.tries, args.gain, found.total(), args.seconds):
            found += new
            print(dict(found), file=sys.stderr)
            if args.record:
                with args.record.open("a") as file:
                    print(json.dumps({**what, "outcomes": new}), file=file)
    print(json.dumps({"tries": found.total(), **what, **found}))


if __name__ == "__main__":
    main()
