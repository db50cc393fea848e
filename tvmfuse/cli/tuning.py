"""`tvmfuse tune`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

import tvmfuse

from ..errors import DeviceError, TooNoisy, UsageError
from .arguments import AsJson, Logs, Model, Numerics, Rpc, Shapes, Threads, parse_shapes
from .output import brief, cells, counted, describe, say

if TYPE_CHECKING:
    from ..decide.search import Allotment


def tune(
    model: Model,
    shape: Shapes = None,
    threads: Threads = None,
    budget: Annotated[str, typer.Option(help="Time to spend, such as 90s, 10m or 2h.")] = "10m",
    logs: Logs = None,
    numerics: Numerics = "exact",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which sites would be measured, in which order.")] = False,
    rpc: Rpc = None,
    as_json: AsJson = False,
) -> None:
    """Measure each site's placements; record the best."""
    from .progress import progress  # these wait for rich
    from .tables import print_table

    shapes = parse_shapes(shape)
    if dry_run and rpc:
        raise UsageError("--dry-run plans for this CPU, not for --rpc")
    if dry_run:
        from .. import tuning  # brings in TVM, which --help doesn't wait for

        show_plan(tuning.dry_run(model, shapes=shapes, threads=threads, budget=budget, logs=logs, numerics=numerics), as_json)
        return
    try:
        with progress(model.name) as report:
            summary = tvmfuse.tune(
                model, shapes=shapes, threads=threads, budget=budget, logs=logs, progress=report, numerics=numerics, rpc=rpc
            )
    except KeyboardInterrupt:
        say("interrupted; what was measured is in the log, and the same command again goes on from there")
        raise typer.Exit(130) from None
    became = [(site, summary.outcome(site.workload)) for site in summary.sites]
    if as_json:
        typer.echo(json.dumps({"left": summary.left, "sites": [{**describe(site), "this_run": outcome} for site, outcome in became]}))
    else:
        print_table([{**cells(site), "this run": outcome} for site, outcome in became], [brief(*each) for each in became])
    say(str(summary))
    if summary.left:
        say(f"the same command again goes on with what is left: {counted(summary.left, 'different site')}")
    if summary.results and all(result.too_noisy for result in summary.results):
        raise TooNoisy("the A/A control was too unsteady at every site, so nothing was decided; stop what else runs here, then tune again")
    if summary.gate_failure:
        raise DeviceError(f"the whole model could not be compared: {summary.gate_failure}; what was measured of its sites is kept")


def show_plan(plan: Allotment, as_json: bool) -> None:
    """Sites in the order in which they would be measured; those that the budget doesn't reach have no seconds."""
    from .tables import print_table  # waits for rich

    planned = [*plan.shares, *((demand, 0.0) for demand in plan.unreached)]
    if as_json:
        told = [
            {
                "site": d.name,
                "workload": str(d.workload),
                "workload_hash": d.workload.hash(),
                "count": d.count,
                "expected_gain_s": d.gain_s,
                "seconds": s,
            }
            for d, s in planned
        ]
        typer.echo(json.dumps(told))
        return
    rows = [
        (
            {
                "site": demand.name,
                "times": str(demand.count),
                "expected gain us": f"{demand.gain_s * demand.count * 1e6:.3g}",
                "seconds": f"{seconds:.1f}" if seconds else "not reached",
            },
            (str(demand.workload),),
        )
        for demand, seconds in planned
    ]
    print_table([{**row, "computes": text} for row, (text,) in rows], rows)
