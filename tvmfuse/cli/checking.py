"""`tvmfuse check`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..errors import CheckFailed
from .arguments import AsJson, Fuse, Logs, Model, Numerics, Shapes, Threads, parse_shapes
from .output import counted, say, visible


def check(
    model: Model,
    against: Annotated[Path, typer.Option(metavar="FILE.json", dir_okay=False, help="What an earlier build came to.")],
    write: Annotated[bool, typer.Option("--write", help="Write that file instead.")] = False,
    shape: Shapes = None,
    threads: Threads = None,
    fuse: Fuse = "measured",
    logs: Logs = None,
    speed: Annotated[bool, typer.Option(help="Measure speed against a reference kernel too.")] = True,
    tolerance: Annotated[float, typer.Option(min=0, help="How much slower is still well: 0.1 for a tenth.")] = 0.1,
    numerics: Numerics = "exact",
    as_json: AsJson = False,
) -> None:
    """Fail (exit code 8) if a model is fused less, gives other bits or runs slower than a file says."""
    from .. import check as checking  # waits for TVM

    judgement = checking.check(
        model,
        against,
        shapes=parse_shapes(shape),
        threads=threads,
        fuse=fuse,
        logs=logs,
        write=write,
        speed=speed,
        tolerance=tolerance,
        numerics=numerics,
    )
    if as_json:
        typer.echo(json.dumps({"ok": not judgement.differences, **asdict(judgement)}))
    else:
        for line in judgement.differences:
            typer.echo(visible(line))
    for note in judgement.notes:
        say(note)
    if judgement.differences:
        found = counted(len(judgement.differences), "difference")
        raise CheckFailed(f"{model}: {found} from {against}; if meant, record the new state with --write")
    say(f"{against}: {'written' if write else 'no difference'}")
