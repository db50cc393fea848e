"""`tvmfuse log`: what a tuning log holds, whether it is sound, and several logs made one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import CheckFailed, UsageError
from .arguments import AsJson
from .output import counted, say

if TYPE_CHECKING:
    from ..decide.log import Log

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Sources = Annotated[
    list[Path] | None, typer.Argument(metavar="[LOG]...", help="Folders or .jsonl files; by default the shipped one and your own.")
]
Into = Annotated[Path | None, typer.Option("--into", file_okay=False, help="The folder that is written; by default your own.")]


def opened(*sources: Path) -> Log:
    """Without sources the shipped log and the user's own."""
    from ..decide.log import Log  # --help doesn't wait for it

    return Log(sources) if sources else Log.shipped_and_own()


def folder(into: Path | None) -> Log:
    return opened(into or opened().folders[-1])


def files(sources: Sequence[Path] | None) -> list[tuple[Path, Log]]:
    """Every .jsonl file of the sources. Raises UsageError for what isn't there."""
    found: list[Path] = []
    for source in sources or opened().folders:
        if sources and not source.exists():
            raise UsageError(f"there is no log {source}")
        found += [source] if source.is_file() else sorted(source.glob("*.jsonl"))
    return [(path, opened(path)) for path in found]


@app.command()
def stats(sources: Sources = None, as_json: AsJson = False) -> None:
    """Count what each file holds."""
    from ..decide.log import is_finished
    from .tables import print_table  # waits for rich

    rows = []
    for path, log in files(sources):
        counts, sites = log.stats(), log.sites()
        rows.append(
            {
                "log": str(path),
                "bytes": path.stat().st_size,
                "records": sum(n for kind, n in counts.items() if kind not in ("failed", "damaged")),
                "sites": len(sites),
                "finished": sum(map(is_finished, sites)),
                "won": sum(any(r.verdict is not None and r.verdict.outcome == "wins" for r in site) for site in sites),
                "failed": counts["failed"],
                "damaged": counts["damaged"],
            }
        )
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        if not rows:
            say(f"no records in {', '.join(map(str, sources or opened().folders))}")
        print_table([{key: str(value) for key, value in row.items()} for row in rows])


@app.command()
def verify(sources: Sources = None, as_json: AsJson = False) -> None:
    """Read every record; exit code 8 when a line is damaged."""
    logs = [log for _, log in files(sources)]
    records = sum(1 for log in logs for _ in log.records())
    damage = [damaged for log in logs for damaged in log.damage]  # known once everything is decoded
    if as_json:
        found = [{"file": str(d.path), "line": d.line, "why": d.why} for d in damage]
        typer.echo(json.dumps({"records": records, "damage": found}))
    else:
        for damaged in damage:
            typer.echo(str(damaged))
    if damage:
        state = f"{counted(len(damage), 'line')} damaged, {counted(records, 'record')} sound"
        raise CheckFailed(f"{state}; `tvmfuse log compact` drops what is damaged")
    say(f"{counted(records, 'record')}, none damaged")


@app.command()
def compact(into: Into = None, as_json: AsJson = False) -> None:
    """Rewrite a folder to what builds and predictions need."""
    log = folder(into)
    removed = log.compact()
    if as_json:
        typer.echo(json.dumps({"folder": str(log.folders[-1]), "removed_bytes": removed}))
    else:
        say(f"{log.folders[-1]}: {removed} bytes less")


@app.command()
def merge(
    sources: Annotated[list[Path], typer.Argument(metavar="LOG...", exists=True, help="Folders or .jsonl files to read.")],
    into: Into = None,
    as_json: AsJson = False,
) -> None:
    """Add the records of other logs that are not there yet."""
    log, other = folder(into), opened(*sources)
    added = log.merge(other)
    if as_json:
        typer.echo(json.dumps({"folder": str(log.folders[-1]), "added": added, "damaged": len(other.damage)}))
    else:
        for damaged in other.damage:
            say(str(damaged))
        say(f"{log.folders[-1]}: {counted(added, 'record')} more")
