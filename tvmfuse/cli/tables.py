"""Results as tables on stdout."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from .output import visible

UNLIMITED = 10_000  # columns


def stdout() -> Console:
    """Wide where no terminal sets a width, so that a pipe or a file gets whole lines."""
    return Console(width=None if sys.stdout.isatty() else UNLIMITED, highlight=False)


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """A line a row; where that is wider than the terminal, a paragraph a row: folded cells can't be read. Empty columns are left out."""
    if not rows:
        return
    headings = [heading for heading in rows[0] if any(row[heading] for row in rows)]
    console, table = stdout(), Table(*headings, box=None)
    for row in rows:
        table.add_row(*(escape(visible(row[heading])) for heading in headings))
    unlimited = console.options.update(max_width=UNLIMITED)
    if Measurement.get(console, unlimited, table).maximum <= console.width:
        _print(console, table)
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
    _print(console, grid)


def print_heading(text: str) -> None:
    """Of what follows."""
    console = stdout()
    if console.is_terminal:
        console.rule(escape(visible(text)), align="left")
    else:
        console.print(f"\n{escape(visible(text))}:")


def _print(console: Console, shown: RenderableType) -> None:
    """Without the blanks that fill a table's last column."""
    with console.capture() as captured:
        console.print(shown)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
