"""Findings as one HTML file that needs nothing else: styles, script and plots are in it."""

from __future__ import annotations

from pathlib import Path

import jinja2

from .axis import Axis
from .findings import Findings, KernelLine

LABELLED = 8  # points of the roofline that carry their rank; more would cover each other
DASHES = ("none", "9 3", "4 3", "1.5 3")  # of the roofs, the nearest memory first
UNITS = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))


def render(findings: Findings) -> str:
    """The page. Every name from the model is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"time": time_text, "ratio": "{:.3f}".format, "percent": "{:+.1f} %".format, "num": number_text}
    kernels = sorted(findings.kernels, key=lambda k: -k.time_s)
    total_s = sum(k.time_s for k in kernels)
    shown = [site for site in findings.sites if site.ratio is not None or site.rivals]
    ratios = [x for s in shown for x in ((*s.ci, s.ratio) if s.ci and s.ratio else ())]
    ratios += [x for s in shown for _, ratio, ci in s.rivals for x in (ratio, *ci)]
    return environment.get_template("page.html.jinja").render(
        findings=findings,
        counts=findings.counts(),
        time_axis=Axis.around([t.seconds[2] for t in findings.timings], always=[0.0]),
        ratio_axis=Axis.around(ratios, log=True, always=[0.98, 1.02]),
        measured=shown,
        kernels=kernels,
        total_s=total_s,
        bound_s=sum(k.bound_s for k in kernels),
        plot=roofline_plot(findings, kernels),
        labelled=LABELLED,
        dashes=DASHES,
    )


def roofline_plot(findings: Findings, kernels: list[KernelLine]) -> dict[str, object]:
    """Axes, roofs and points: flop per byte against flop per second, both logarithmic. Kernels without flop have no place on it."""
    limits = findings.roofline
    points = [(rank, k) for rank, k in enumerate(kernels, 1) if k.flop and k.bytes]
    ridges = [limits.flop_per_s / level.bytes_per_s for level in limits.levels]
    x = Axis.around([k.flop / k.bytes for _, k in points], log=True, always=[min(ridges) / 4, max(ridges) * 4])
    rates = [k.flop / k.time_s for _, k in points]
    y = Axis.around(rates, log=True, always=[limits.flop_per_s, limits.flop_per_s / 100])
    longest = max((k.time_s for _, k in points), default=1.0)
    return {
        "x": x,
        "y": y,
        "peak": limits.flop_per_s,
        "roofs": [_roof(level.name, level.bytes_per_s, limits.flop_per_s, x, y) for level in limits.levels],
        "points": [
            {"rank": rank, "kernel": k, "x": x.at(k.flop / k.bytes), "y": 100 - y.at(k.flop / k.time_s), "r": _radius(k.time_s, longest)}
            for rank, k in points
        ],
    }


def _roof(name: str, bytes_per_s: float, peak: float, x: Axis, y: Axis) -> dict[str, object]:
    """The slanted part of one level's roof, clipped to the plot; it meets the peak at its ridge."""
    left = max(x.low, y.low / bytes_per_s)
    ridge = peak / bytes_per_s
    return {
        "name": name,
        "bytes_per_s": bytes_per_s,
        "x1": x.at(left),
        "y1": 100 - y.at(left * bytes_per_s),
        "x2": x.at(ridge),
        "y2": 100 - y.at(peak),
    }


def _radius(time_s: float, longest: float) -> float:
    """Area in proportion to time."""
    return round(3 + 9 * (time_s / longest) ** 0.5, 2)


def time_text(seconds: float) -> str:
    scale, unit = next((scale, unit) for least, scale, unit in UNITS if seconds >= least)
    return f"{seconds * scale:#.3g}".rstrip(".") + f" {unit}"


def number_text(value: float) -> str:
    """Three digits, no exponent, and no zeros that say nothing."""
    return f"{float(f'{value:.3g}'):.10f}".rstrip("0").rstrip(".")
