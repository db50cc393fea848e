"""`tvmfuse explain`."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

import tvmfuse

from .arguments import AsJson, Logs, Model, Shapes, Threads, parse_shapes
from .output import cells, describe, print_table


def explain(model: Model, shape: Shapes = None, threads: Threads = None, logs: Logs = None, as_json: AsJson = False) -> None:
    """Say what is fused where, and why or why not."""
    report = tvmfuse.explain(model, shapes=parse_shapes(shape), threads=threads, logs=logs)
    if as_json:
        sites = [{**describe(e.site), "predicted_s": e.predicted_s, "bytes_saved": e.bytes_saved} for e in report.sites]
        typer.echo(json.dumps({"sites": sites, "refusals": [asdict(refusal) for refusal in report.refusals]}))
        return
    print_table(
        [{**cells(e.site), "predicted us": f"{e.predicted_s * 1e6:.3g}", "saves KiB": f"{e.bytes_saved / 1024:.3g}"} for e in report.sites]
    )
    for refusal in report.refusals:
        typer.echo(str(refusal))
