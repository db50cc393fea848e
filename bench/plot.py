"""Our time over the best peer's as a picture: a dot with its interval for each model and column, a tick for the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import jinja2

from .targets import COLUMNS, Standing

LEFT, WIDTH, ROW, TOP = 170, 560, 30, 60
COLOURS = ("#0072b2", "#d55e00", "#009e73")  # told apart by the colour-blind: Okabe and Ito
OFFSETS = (-7, 0, 7)
TICKS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8)


def svg(standings: Sequence[Standing]) -> str:
    """The horizontal axis is logarithmic: half the time is as far from 1 as twice the time."""
    shown = [x for s in standings for x in (*s.ratio.interval, s.target or 1.0)] or [1.0]
    ticks = [t for t in TICKS if 0.8 * min(shown) <= t <= 1.25 * max(shown)] or [1.0]
    low, high = math.log(min(*shown, *ticks, 0.9) * 0.95), math.log(max(*shown, *ticks, 1.1) * 1.05)

    def x(value: float) -> float:
        return round(LEFT + WIDTH * (math.log(value) - low) / (high - low), 1)

    models = list(dict.fromkeys(s.model for s in standings))
    marks = []
    for s in standings:
        column = COLUMNS.index(s.column)
        y = TOP + ROW * models.index(s.model) + ROW / 2 + OFFSETS[column]
        marks.append(
            {
                "y": y,
                "from": x(s.ratio.interval[0]),
                "to": x(s.ratio.interval[1]),
                "at": x(s.ratio.median),
                "target": None if s.target is None else x(s.target),
                "colour": COLOURS[column],
                "title": f"{s.model}, {s.column.title}: {s.ratio.median:.3f} of {s.best}",
            }
        )
    template = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
        (Path(__file__).parent / "plot.svg.jinja").read_text()
    )
    return template.render(
        width=LEFT + WIDTH + 20,
        height=TOP + ROW * len(models) + 40,
        left=LEFT,
        right=LEFT + WIDTH,
        top=TOP,
        bottom=TOP + ROW * len(models),
        names=[{"text": m, "y": TOP + ROW * i + ROW / 2 + 4, "line": TOP + ROW * (i + 1)} for i, m in enumerate(models)],
        ticks=[{"text": f"{t:g}", "x": x(t), "one": t == 1.0} for t in ticks],
        marks=marks,
        legend=[{"text": c.title, "colour": COLOURS[i], "x": LEFT + i * 200} for i, c in enumerate(COLUMNS)],
    )
