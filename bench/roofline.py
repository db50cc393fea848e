"""This machine's limits, and how near to them each kernel of a model comes: `python -m bench.roofline [MODEL ...]`.

A kernel's bound is max(flop / peak, bytes / bandwidth of the level of memory that they come from); fraction = bound / time.
"""

from __future__ import annotations

import argparse
import os

from . import models


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.roofline", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=" ".join(models.ZOO))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--fuse", choices=("measured", "always", "never"), default="measured")
    args = parser.parse_args()
    unknown = [name for name in args.models if name not in models.ZOO]
    if unknown:
        parser.error(f"no model named {unknown[0]}; there are {', '.join(models.ZOO)}")
    # TVM's thread pool reads both before its first parallel call.
    os.environ["TVM_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    import tvmfuse
    from tvmfuse.measure.roofline import roofline

    limits = roofline(args.threads)
    print(f"{args.threads} threads: {limits.flop_per_s / 1e9:.1f} GFLOP/s")
    for level in limits.levels:
        holds = "" if level.holds == float("inf") else f"{level.holds / 1024:.0f} KiB"
        print(f"{level.name:5} {holds:>10} {level.bytes_per_s / 1e9:6.1f} GB/s")
    for name in args.models:
        session = tvmfuse.build(models.load(name), shapes=models.shapes(name), threads=args.threads, fuse=args.fuse)
        workloads = {site.name: str(site.workload) for site in session.sites}
        times = session.profile(models.inputs(name), roofline=limits)
        spent, bound = sum(t.time_s for t in times), sum(t.bound_s for t in times)
        print(
            f"\n{name}: {spent * 1e3:.3f} ms in {sum(t.launches for t in times)} kernels, bound {bound * 1e3:.3f} ms ({bound / spent:.0%})"
        )
        print("      us  launches  fraction  GFLOP/s  kernel")
        for t in times:
            rate = f"{t.cost.flop * t.launches / t.time_s / 1e9:7.1f}" if t.cost.flop else "      -"
            what = workloads[t.sites[0]] if t.sites else t.kernel
            print(f"{t.time_s * 1e6:8.1f}  {t.launches:8}  {t.bound_s / t.time_s:8.2f}  {rate}  {what}")


if __name__ == "__main__":
    main()
