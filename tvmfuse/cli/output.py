"""What commands write where: results to stdout, progress and prose to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..errors import UsageError
from ..values import Site


def check_output(path: Path, model: Path) -> None:
    """Before anything is computed: raises UsageError for a file that couldn't be written, or that would replace the model."""
    if not path.parent.is_dir():
        raise UsageError(f"can't write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"can't write {path}: the folder {path.parent} is read-only")
    if path.exists() and path.samefile(model):
        raise UsageError(f"{path} is the model itself; write to another file")


def say(text: str) -> None:
    typer.echo("\n".join(map(visible, text.split("\n"))), err=True)


def visible(text: str) -> str:
    """Names come from the model: what would steer the terminal is written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def stdout() -> Console:
    """Wide where no terminal sets a width, so that a pipe or a file gets whole lines."""
    return Console(width=None if sys.stdout.isatty() else 240, highlight=False)


@contextmanager
def progress(title: str) -> Iterator[Callable[[float, str], None]]:
    """A bar with the time left, on stderr, while a terminal is there; the caller reports the fraction done and what it is doing."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(20), TimeElapsedColumn(), TimeLeft()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(title, total=1.0, whole_s=None)

        def tell(done: float, doing: str) -> None:
            whole_s = (bars.tasks[0].elapsed or 0.0) / done if done > 0 else None
            bars.update(task, completed=done, description=f"{title}: {doing}", whole_s=whole_s)

        yield tell


class TimeLeft(ProgressColumn):
    """Counts down between reports: what is reported is the part of the time that is spent."""

    def render(self, task: Task) -> Text:
        if task.fields["whole_s"] is None:
            return Text("")
        left = max(0.0, task.fields["whole_s"] - (task.elapsed or 0.0))
        return Text(f"{timedelta(seconds=round(left))} left")


def describe(site: Site) -> dict[str, Any]:
    """A site as JSON; the workload as its text and the hash that its records carry."""
    fields = {key: value for key, value in asdict(site).items() if key != "workload"}
    return {**fields, "workload": str(site.workload), "workload_hash": site.workload.hash()}


def placed(site: Site) -> str:
    """Where the epilogue is computed, and how many of its steps."""
    return f"{site.placement} {site.cut}/{len(site.workload.epilogue.steps)}" if site.placement else "-"


def place_cells(site: Site) -> dict[str, str]:
    """What a site is and where it is computed: heading -> text."""
    return {
        "site": site.name,
        "anchor": anchor(site),
        "epilogue": " ".join(site.epilogue),
        "across": " ".join(site.crossed),
        "placement": placed(site),
    }


def interval(site: Site) -> str:
    """Behind a ratio; empty where none was measured."""
    return f" [{site.ci[0]:.3f}, {site.ci[1]:.3f}]" if site.ci else ""


def cells(site: Site) -> dict[str, str]:
    """A site as a line of a table: heading -> text."""
    return {
        **place_cells(site),
        "ratio [interval]": f"{site.ratio:.3f}{interval(site)}" if site.ratio is not None else "",
        "source": site.source,
        "reason": site.reason or "",
        "exact because": site.why_not_relaxed or "",
    }


def anchor(site: Site) -> str:
    """What is computed, with the algorithm of the relaxed class and what was measured of its error."""
    if site.algorithm is None:
        return site.anchor
    return f"{site.anchor} by {site.algorithm} ({'unmeasured' if site.relative_error is None else f'error {site.relative_error:.1e}'})"


def show(sites: Sequence[Site], as_json: bool, **facts: object) -> None:
    if as_json:
        typer.echo(json.dumps({**facts, "sites": [describe(site) for site in sites]}))
    else:
        print_table([cells(site) for site in sites])


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """A line a row; where that is wider than the terminal, a paragraph a row: folded cells can't be read. Empty columns are left out."""
    if not rows:
        return
    headings = [heading for heading in rows[0] if any(row[heading] for row in rows)]
    console, table = stdout(), Table(*headings, box=None)
    for row in rows:
        table.add_row(*(escape(visible(row[heading])) for heading in headings))
    unlimited = console.options.update(max_width=10_000)
    if not console.is_terminal or Measurement.get(console, unlimited, table).maximum <= console.width:
        console.print(table)
        return
    for row in rows:
        print_fields(row)


def print_fields(fields: Mapping[str, str]) -> None:
    """The first as a heading, the others that say something below it."""
    (title, name), *rest = fields.items()
    console, grid = stdout(), Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    console.print(f"{title} [bold]{escape(visible(name))}[/]")
    for heading, text in rest:
        if text:
            grid.add_row(escape(visible(heading)), escape(visible(text)))
    console.print(grid)
