"""A bar on stderr while a command works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

BAR = 20
ROOM = BAR + 24  # columns of a line that the bar, both times and what parts them take


@contextmanager
def progress(title: str) -> Iterator[Callable[[float, str], None]]:
    """A bar with the time left, on stderr, while a terminal is there; the caller reports the fraction done and what it is doing."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(BAR), TimeElapsedColumn(), TimeLeft()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(title, total=1.0, whole_s=None)

        def tell(done: float, doing: str) -> None:
            whole_s = (bars.tasks[0].elapsed or 0.0) / done if done > 0 else None
            text, room = f"{title}: {doing}", max(console.width - ROOM, 1)
            bars.update(task, completed=done, description=text if len(text) <= room else f"{text[: room - 1]}…", whole_s=whole_s)

        yield tell


class TimeLeft(ProgressColumn):
    """Counts down between reports: what is reported is the part of the time that is spent."""

    def render(self, task: Task) -> Text:
        if task.fields["whole_s"] is None:
            return Text("")
        left = max(0.0, task.fields["whole_s"] - (task.elapsed or 0.0))
        return Text(f"{timedelta(seconds=round(left))} left")
