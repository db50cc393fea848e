"""`tvmfuse demo`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import AsJson, Logs
from .output import brief, cells, counted, describe, say

if TYPE_CHECKING:
    from ..compare import Row
    from ..demo import Showing


def demo(
    seconds: Annotated[float, typer.Option(min=15, help="Time to tune in all. To compare takes some 15 s a network more.")] = 60,
    logs: Logs = None,
    as_json: AsJson = False,
) -> None:
    """Tune DeepFilterNet3 for a minute, then compare with ONNX Runtime.

    20 seconds are enough for the first of its three networks, 60 for all. The records are kept: the same command again goes on from there.
    """
    from .. import demo as networks  # --help waits for none of these
    from .progress import progress
    from .tables import print_heading, print_table

    names = networks.reached(seconds)
    enough = "" if len(names) == len(networks.NETWORKS) else f"; all three take --seconds {networks.NETWORK_S * len(networks.NETWORKS):.0f}"
    whole = seconds + networks.COMPARING_S * len(names)
    say(f"DeepFilterNet3's {', '.join(names)}: {seconds:g} s of tuning, then comparing, about {whole:.0f} s in all{enough}")
    found = []
    with progress("demo") as report:
        for showing in networks.shown(seconds, logs, report):
            found.append(showing)
            say(f"{showing.name}: {showing.summary}")
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "sites": {showing.name: [describe(site) for site in showing.sites] for showing in found},
                    "times": [asdict(row) for showing in found for row in showing.rows],
                    "left": {showing.name: showing.summary.left for showing in found},
                    "same_bits": {showing.name: showing.same_bits for showing in found},
                }
            )
        )
        return
    for showing in found:
        print_heading(showing.name)
        outcomes = [(site, showing.summary.outcome(site.workload)) for site in showing.sites]
        became = [(site, outcome) for site, outcome in outcomes if outcome != "not reached"]
        print_table([{**cells(site), "this run": outcome} for site, outcome in became], [brief(*each) for each in became])
        unreached = [site.name for site, outcome in outcomes if outcome == "not reached"]
        if unreached:
            typer.echo(f"not reached: {', '.join(unreached)}")
    print_heading("one call, one thread")
    print_table([time_cells(row) for showing in found for row in showing.rows])
    say(conclusion(found))


def time_cells(row: Row) -> dict[str, str]:
    """A runner as a line of a table: heading -> text."""
    found = {"network": row.model, "runner": row.runner}
    if row.ratio is None or row.median_s is None:
        return {**found, "ms": "-", "tuned / this": row.reason or "-", "error": "-"}
    low, high = row.ratio.interval
    error = "-" if row.error is None else f"{row.error:.1e}"
    return {**found, "ms": f"{row.median_s * 1e3:.4f}", "tuned / this": f"{row.ratio.median:.3f} [{low:.3f}, {high:.3f}]", "error": error}


def conclusion(found: list[Showing]) -> str:
    speedups = {showing.name: showing.speedup for showing in found}
    faster = ", ".join(f"{name} {times:.2f}" for name, times in speedups.items() if times is not None)
    lines = [f"times as fast as ONNX Runtime: {faster}"] if faster else []
    differing, equal = (", ".join(showing.name for showing in found if showing.same_bits is same) for same in (False, True))
    if differing:
        lines.append(f"{differing}: tuned, always and never fused differ in their output bits: report this")
    elif equal:
        lines.append(f"{equal}: tuned, always and never fused give the same output bits")
    if left := sum(showing.summary.left for showing in found):
        lines.append(f"the same command again goes on with what is left: {counted(left, 'different site')}")
    return "\n".join(lines)
