"""python -m bench: the zoo in tvmfuse and beside it. Results on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time

from . import models, run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=run.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models.ZOO, default=list(models.ZOO), metavar="NAME", help=" ".join(models.ZOO))
    parser.add_argument(
        "--runners", nargs="+", choices=run.PEERS, default=["tvmfuse", "onnxruntime"], metavar="NAME", help=", ".join(run.PEERS)
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10, help="for each model (default: 10)")
    parser.add_argument("--json", action="store_true", help="one JSON list instead of the table")
    args = parser.parse_args()

    # Read by TVM's thread pool before its first parallel call.
    os.environ["TVM_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    rows: list[run.Row] = []
    for name in args.models:
        print(f"{name}: building", file=sys.stderr)
        model, feeds = models.load(name), models.inputs(name)
        runners = {peer: run.PEERS[peer](model, models.shapes(name), feeds, args.threads) for peer in args.runners}
        print(f"{name}: timing for {args.seconds:g} s", file=sys.stderr)
        rows += run.compare(name, runners, args.seconds, time.perf_counter)
    print(json.dumps([dataclasses.asdict(row) for row in rows]) if args.json else run.table(rows))


if __name__ == "__main__":
    main()
