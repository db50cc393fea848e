"""`tvmfuse report`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..files import written
from .arguments import AsJson, Logs, Model, Shapes, Threads, parse_shapes
from .output import check_output, say


def report(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="The HTML file to write.")],
    shape: Shapes = None,
    threads: Threads = None,
    logs: Logs = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time to spend on timing the whole model.")] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Measure a model and write a page about it."""
    from ..report.collect import collect  # waits for TVM, as the last for rich
    from ..report.page import render
    from .progress import progress

    check_output(output, model, b"<!", "report")
    with progress(model.name) as tell:
        findings = collect(model, parse_shapes(shape), threads, logs, seconds, tell)
    with written(output) as partial:
        partial.write_text(render(findings), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps({"report": str(output), "counts": findings.counts(), "timings": [asdict(t) for t in findings.timings]}))
    counts = ", ".join(f"{count} {name}" for name, count in findings.counts().items())
    say(f"{output}: sites: {counts}")
