"""The zoo in tvmfuse and in every other runtime that is installed, each model in interleaved runs; results on stdout, progress on stderr.

Ratios of an interleaved run are what counts; figures mean something on a machine that does little else: see the A/A rows. A run with
one thread times everybody on one; a run with more times us on that many, and the peers on one and on that many.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

from tvmfuse import benching, compare
from tvmfuse.files import written
from tvmfuse.measure.host import host, toolchain
from tvmfuse.peers import PEERS, USUAL

from . import models, plot, targets


@dataclasses.dataclass(frozen=True)
class Run:
    """One interleaved run: one model, and the threads that our code used in it."""

    model: str
    threads: int
    rows: tuple[compare.Row, ...]

    def standings(self) -> list[targets.Standing]:
        return list(targets.standings(self.model, self.threads, self.rows))


def entries(threads: int, fuse: list[str], relaxed: bool, peers: list[str]) -> list[benching.Entry]:
    """Ours with its control first, which the others are compared with."""
    first, *rest = fuse
    found = benching.ours(targets.OURS, threads, fuse=first)
    found += [benching.Entry(f"{targets.OURS} {how}", "tvmfuse", threads, {"fuse": how}) for how in rest]
    if relaxed and threads == 1:
        found.append(benching.Entry(targets.RELAXED, "tvmfuse", threads, {"numerics": "relaxed"}))
    return found + benching.others(peers, threads)


def markdown(runs: list[Run], facts: dict[str, Any]) -> str:
    tables = [f"## {run.model}, {run.threads} thread{'s' * (run.threads > 1)}\n\n{compare.table(run.rows)}" for run in runs]
    standing = targets.table([s for run in runs for s in run.standings()])
    machine = f"{facts['date']}, {facts['cpu']}, {facts['cpus']} CPUs, tvmfuse {facts['toolchain']['tvmfuse']}."
    machine += "".join(f" {name} {version}." for name, version in facts["peers"].items() if version)
    return "\n\n".join(["# Beside the best peer", machine, standing, *tables]) + "\n"


def write(path: Path, text: str) -> None:
    with written(path) as partial:
        partial.write_text(text)


def write_all(args: argparse.Namespace, facts: dict[str, Any], runs: list[Run]) -> None:
    """The files that were asked for, of all runs so far."""
    if args.json:
        write(args.json, json.dumps({**facts, "runs": [dataclasses.asdict(run) for run in runs]}, indent=1))
    if args.markdown:
        write(args.markdown, markdown(runs, facts))
    if args.plot:
        write(args.plot, plot.svg([s for run in runs for s in run.standings()]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models.ZOO, default=list(models.ZOO), metavar="NAME", help=" ".join(models.ZOO))
    parser.add_argument("--fuse", nargs="+", choices=("measured", "always", "never"), default=["measured"])
    parser.add_argument("--no-relaxed", action="store_true", help='leave out numerics="relaxed"')
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(USUAL), help=f"default: {' '.join(USUAL)}; those not installed are named"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="a run for each number (default: 1)")
    parser.add_argument("--seconds", type=float, default=10, help="of timing for each run (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured, after each run")
    parser.add_argument("--resume", action="store_true", help="keep the runs that the file of --json holds already")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables, after each run")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write our ratios to the best peers as SVG, after each run")
    args = parser.parse_args()
    if args.resume and not args.json:
        parser.error("--resume needs --json FILE")

    today = datetime.date.today().isoformat()
    facts = {"date": today, "cpu": host().name, "cpus": os.cpu_count(), "host": dataclasses.asdict(host()), "toolchain": toolchain()}
    facts["peers"] = {name: PEERS[name].version() for name in args.peers}
    runs: list[Run] = []
    if args.resume and args.json.exists():
        for data in json.loads(args.json.read_text())["runs"]:
            runs.append(Run(data["model"], data["threads"], tuple(compare.Row.from_json(row) for row in data["rows"])))
        write_all(args, facts, runs)  # no other run may follow
    done = {(run.model, run.threads) for run in runs}
    for name in args.models:
        for threads in args.threads:
            if (name, threads) in done:
                continue
            wanted = entries(threads, args.fuse, not args.no_relaxed, args.peers)

            def say(what: str, title: str = f"{name}, {threads} thread{'s' * (threads > 1)}") -> None:
                print(f"{title}: {what}", file=sys.stderr, flush=True)

            rows = benching.bench(name, models.load(name), models.inputs(name), wanted, args.seconds, progress=say)
            runs.append(Run(name, threads, tuple(rows)))
            print(compare.table(rows), flush=True)
            write_all(args, facts, runs)
    print("\n" + targets.table([s for run in runs for s in run.standings()]))
