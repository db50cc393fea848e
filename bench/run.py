"""The zoo in tvmfuse and beside it, each model in one interleaved run. Results on stdout, progress on stderr.

The first runner is the one that the others are compared with; `python -m bench --fuse measured always never` compares
placements, `--peers` names other runtimes. Figures mean something on a machine that does little else: see the A/A rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Literal

from tvmfuse import compare

from . import models


def rows(
    name: str, fuse: Sequence[Literal["measured", "always", "never"]], peers: Sequence[str], threads: int, seconds: float
) -> list[compare.Row]:
    """One model: a row for each way to fuse and each peer, and one for the first against itself."""
    import tvmfuse

    model, shapes, feeds = models.load(name), models.shapes(name), models.inputs(name)
    runners = {f"tvmfuse {how}": compare.bound(tvmfuse.build(model, shapes=shapes, fuse=how, threads=threads), feeds) for how in fuse}
    runners |= {peer: compare.PEERS[peer](model, shapes, feeds, threads) for peer in peers}
    return compare.compare(name, runners, seconds, time.perf_counter)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models.ZOO, default=list(models.ZOO), metavar="NAME", help=" ".join(models.ZOO))
    parser.add_argument("--fuse", nargs="*", choices=("measured", "always", "never"), default=["measured"])
    parser.add_argument("--peers", nargs="*", choices=compare.PEERS, default=[p for p in compare.PEERS if importlib.util.find_spec(p)])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10, help="of timing for each model (default: 10)")
    parser.add_argument("--json", action="store_true", help="a JSON list instead of the table")
    args = parser.parse_args()
    if not args.fuse and not args.peers:
        parser.error("nothing to time: --fuse and --peers are both empty")

    # TVM's thread pool reads both before its first parallel call.
    os.environ["TVM_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    found: list[compare.Row] = []
    for name in args.models:
        print(name, file=sys.stderr)
        found += rows(name, args.fuse, args.peers, args.threads, args.seconds)
    print(json.dumps([dataclasses.asdict(row) for row in found]) if args.json else compare.table(found))
