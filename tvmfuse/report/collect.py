"""Measure what a report shows: the whole model always, never and as decided, in one interleaved run, then each kernel."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from .. import compare
from ..building import build
from ..explaining import Explained, explain
from ..measure.host import host, isa_among, toolchain
from ..measure.roofline import roofline
from ..processors import default_threads
from ..values import Site
from .findings import Findings, KernelLine, SiteLine, Timing

Progress = Callable[[float, str], None]
WAYS = {"tuned": "measured", "always fused": "always", "never fused": "never"}


def collect(
    model: str | os.PathLike[str],
    shapes: Mapping[str, Any] | None = None,
    threads: int | None = None,
    logs: str | os.PathLike[str] | None = None,
    seconds: float = 5.0,
    progress: Progress = lambda done, doing: None,
) -> Findings:
    """Build the model three times and time it. Arguments as for `build`; seconds: of timing the whole model."""
    threads = threads or default_threads()
    progress(0.0, "finding sites")
    explained = explain(model, shapes, threads=threads, logs=logs, roofline=roofline)
    limits = roofline(threads)
    sessions = {}
    for at, (label, fuse) in enumerate(WAYS.items()):
        progress(0.15 + 0.15 * at, f"building: {label}")
        sessions[label] = build(model, shapes, threads=threads, fuse=fuse, logs=logs)  # type: ignore[arg-type]
    tuned = sessions["tuned"]
    rng = np.random.default_rng(0)
    feeds = {i.name: compare.draw(rng, i.shape, i.dtype) for i in tuned.get_inputs()}
    progress(0.6, f"timing the whole model for {seconds:g} s")
    calls = {label: compare.bound(session, feeds) for label, session in sessions.items()}
    samples = compare.samples({**calls, "tuned again": calls["tuned"]}, seconds, time.perf_counter)
    progress(0.9, "timing each kernel")
    kernels = tuned.profile(feeds, roofline=limits)
    ratios = {label: [t / own for t, own in zip(times, samples["tuned"], strict=True)] for label, times in samples.items()}
    low, _, high = compare.quartiles(ratios["tuned again"])
    return Findings(
        model=Path(model).name,
        timings=[
            Timing(label, compare.quartiles(samples[label]), compare.quartiles(ratios[label]) if label != "tuned" else (1.0, 1.0, 1.0))
            for label in calls
        ],
        noise=(low, high),
        rounds=len(samples["tuned"]),
        sites=[_line(e) for e in explained.sites],
        kernels=[
            KernelLine(k.kernel, k.sites, k.launches, k.time_s, k.cost.flop, k.cost.activation_bytes + k.cost.constant_bytes, k.bound_s)
            for k in kernels
        ],
        roofline=limits,
        environment=_environment(threads, list(samples["tuned"])),
    )


def _line(e: Explained) -> SiteLine:
    site = e.site
    rivals = [(str(o.candidate), o.verdict.ratio, o.verdict.ci) for o in e.options if o.verdict and o.verdict.ratio != site.ratio]
    return SiteLine(
        name=site.name,
        anchor=site.anchor,
        epilogue=" ".join(site.epilogue),
        crossed=", ".join(site.crossed),
        placement=f"{site.placement} {site.cut}/{len(site.workload.epilogue.steps)}" if site.placement else "–",
        state=_state(site),
        decided=site.source == "measured" and not e.undecided,
        why=e.why,
        hint=e.hint,
        ratio=site.ratio if site.ci else None,
        ci=site.ci,
        rivals=tuple(rivals),
        predicted_s=e.predicted_s,
        bound_s=e.bound_s,
        bytes_saved=e.bytes_saved,
        blocked=tuple(str(b) for b in e.blocked),
    )


def _state(site: Site) -> str:
    if site.placement is None:
        return "bare"
    return "fused" if site.cut else "separate"


def _environment(threads: int, times_s: list[float]) -> list[tuple[str, str]]:
    here, isa = host(), isa_among(host().features)
    spread = statistics.quantiles(times_s, n=4)
    return [
        ("CPU", here.name or here.key),
        ("instruction set", isa.name if isa else "unknown"),
        ("caches of a core", here.caches),
        ("threads", f"{threads} of {os.cpu_count()}"),
        ("system", f"{platform.system()} {platform.release()}, Python {platform.python_version()}"),
        ("toolchain", ", ".join(f"{name} {version}" for name, version in toolchain().items())),
        ("load before", f"{os.getloadavg()[0]:.2f} runnable processes"),
        ("spread of tuned", f"{(spread[2] - spread[0]) / spread[1]:.1%} between its quartiles"),
        ("measured", datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")),
    ]
