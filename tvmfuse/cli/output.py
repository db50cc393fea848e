"""What commands write where: results to stdout, progress and prose to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..values import Site


def say(text: str) -> None:
    typer.echo(text, err=True)


def stdout() -> Console:
    """Wide where no terminal sets a width, so that a pipe or a file gets whole lines."""
    return Console(width=None if sys.stdout.isatty() else 240, highlight=False)


@contextmanager
def progress(title: str) -> Iterator[Callable[[float, str], None]]:
    """A bar on stderr while a terminal is there; the caller reports the fraction done and what it is doing."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(title, total=1.0)
        yield lambda done, doing: bars.update(task, completed=done, description=f"{title}: {doing}")


def describe(site: Site) -> dict[str, Any]:
    """A site as JSON; the workload as its text and the hash that its records carry."""
    fields = {key: value for key, value in asdict(site).items() if key != "workload"}
    return {**fields, "workload": str(site.workload), "workload_hash": site.workload.hash()}


def cells(site: Site) -> dict[str, str]:
    """A site as a line of a table: heading -> text."""
    interval = f" [{site.ci[0]:.3f}, {site.ci[1]:.3f}]" if site.ci else ""
    return {
        "site": site.name,
        "anchor": site.anchor,
        "epilogue": " ".join(site.epilogue),
        "across": " ".join(site.crossed),
        "placement": f"{site.placement} {site.cut}/{len(site.workload.epilogue.steps)}" if site.placement else "-",
        "ratio [interval]": f"{site.ratio:.3f}{interval}" if site.ratio is not None else "",
        "source": site.source,
        "reason": site.reason or "",
    }


def show(sites: Sequence[Site], as_json: bool, **facts: object) -> None:
    if as_json:
        typer.echo(json.dumps({**facts, "sites": [describe(site) for site in sites]}))
    else:
        print_table([cells(site) for site in sites])


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    if rows:
        table = Table(*rows[0], box=None)
        for row in rows:
            table.add_row(*(escape(text) for text in row.values()))
        stdout().print(table)
