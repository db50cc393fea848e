"""Results as tables on stdout."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from .output import visible

UNLIMITED = 10_000  # columns
SHORTEST_NAME = 12  # below which what is left of a name says nothing
TIGHT: dict[str, Any] = {"box": None, "pad_edge": False, "padding": (0, 2, 0, 0)}
Brief = tuple[Mapping[str, str], Sequence[str]]  # the first columns of a row, and lines that stand below them


def stdout() -> Console:
    """Wide where no terminal sets a width, so that a pipe or a file gets whole lines."""
    return Console(width=None if sys.stdout.isatty() else UNLIMITED, highlight=False)


def print_table(rows: Sequence[Mapping[str, str]], brief: Sequence[Brief] = ()) -> None:
    """A line a row, empty columns left out. Where that is wider than the terminal, the brief rows; without them, or where those don't fit
    either, a paragraph a row: folded cells can't be read."""
    if not rows:
        return
    console, table = stdout(), _table(rows, box=None)
    if _width(console, table) <= console.width:
        _print(console, table)
    elif not (brief and _print_brief(console, brief)):
        for row in rows:
            print_fields(row)


def _print_brief(console: Console, rows: Sequence[Brief]) -> bool:
    """Names that are too long lose their beginning: in a model they have that in common. False when that doesn't help."""
    cells = [{heading: visible(text) for heading, text in row.items()} for row, _ in rows]
    name = next(iter(cells[0]))
    longest = max(cell_len(row[name]) for row in cells)
    room = longest - max(_width(console, _table(cells, **TIGHT)) - console.width, 0)
    if room < min(longest, SHORTEST_NAME):
        return False
    for row in cells:
        row[name] = _end(row[name], room)
    heading, *lines = _lines(console, _table(cells, **TIGHT))
    print(heading)
    for line, (_, below) in zip(lines, rows, strict=True):
        print(line)
        for text in below:
            print("\n".join(textwrap.wrap(visible(text), console.width, initial_indent="  ", subsequent_indent="    ")))
    return True


def _end(text: str, room: int) -> str:
    """What of a text fits into `room` columns, of which some characters take two."""
    if cell_len(text) <= room:
        return text
    while cell_len(text) >= room:
        text = text[1:]
    return f"…{text}"


def _table(rows: Sequence[Mapping[str, str]], **style: Any) -> Table:
    """Without the columns that are empty."""
    headings = [heading for heading in rows[0] if any(row[heading] for row in rows)]
    table = Table(*headings, **style)
    for row in rows:
        table.add_row(*(escape(visible(row[heading])) for heading in headings))
    return table


def _width(console: Console, table: Table) -> int:
    """Of its longest lines."""
    return Measurement.get(console, console.options.update(max_width=UNLIMITED), table).maximum


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
    print("\n".join(_lines(console, shown)))


def _lines(console: Console, shown: RenderableType) -> list[str]:
    """Without the blanks that fill a table's last column."""
    with console.capture() as captured:
        console.print(shown)
    return [line.rstrip() for line in captured.get().splitlines()]
