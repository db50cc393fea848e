"""`tvmfuse explain`."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tvmfuse

from ..errors import UsageError
from .arguments import AsJson, Logs, Model, Numerics, Shapes, Threads, parse_shapes
from .output import brief, counted, describe, interval, place_cells, say, visible

if TYPE_CHECKING:
    from ..explaining import Explained, Option
    from ..values import Roofline


def explain(
    model: Model,
    site: Annotated[
        str | None, typer.Argument(metavar="[SITE]", help="One site, by its name or a part of it: all that is known of it.")
    ] = None,
    before_after: Annotated[bool, typer.Option("--before-after", help="Show the Relax IR around SITE before and after hoisting.")] = False,
    bound: Annotated[bool, typer.Option(help="Measure this machine's limits, which takes a second or two, for each site's bound.")] = True,
    shape: Shapes = None,
    threads: Threads = None,
    logs: Logs = None,
    numerics: Numerics = "exact",
    as_json: AsJson = False,
) -> None:
    """Say what is fused where, and why or why not."""
    from .tables import print_fields, print_heading, print_table  # wait for rich

    if before_after and site is None:
        raise UsageError("--before-after takes one SITE")
    site = site and site.removeprefix("…")  # as a narrow table writes long names
    limits = measure_limits if bound else None
    report = tvmfuse.explain(model, shapes=parse_shapes(shape), threads=threads, logs=logs, roofline=limits, numerics=numerics)
    sites = report.sites if site is None else [report.site(site)]
    excerpts = report.before_after(site) if before_after and site else None
    if as_json:
        refusals = report.refusals if site is None else sites[0].blocked
        told = {"sites": [as_data(e) for e in sites], "refusals": [asdict(refusal) for refusal in refusals]}
        typer.echo(json.dumps({**told, **({"before": excerpts[0], "after": excerpts[1]} if excerpts else {})}))
        return
    if site is None:
        print_table([cells(e) for e in sites], [brief_cells(e) for e in sites])
        for refusal in report.refusals:
            typer.echo(visible(str(refusal)))
        if not sites:
            say(f"{model}: no sites: there is no matmul, convolution or recurrent layer in it that an epilogue could be fused to")
            return
        again = shlex.join(["tvmfuse", "explain", str(model), *(word for given in shape or () for word in ("--shape", given))])
        say(f"{counted(len(sites), 'site')}, {counted(len(report.refusals), 'refusal')}; `{again} SITE` tells all of one")
        return
    print_fields({**cells(sites[0]), **{f"not in the loop: {b.op}": str(b) for b in sites[0].blocked}})
    typer.echo()
    print_table([option_cells(option) for option in sites[0].options])
    if excerpts:
        for title, text in zip(("before hoisting", "after hoisting"), excerpts, strict=True):
            print_heading(title)
            typer.echo("\n".join(map(visible, text.splitlines())))


def cells(e: Explained) -> dict[str, str]:
    """A site as a line of a table: heading -> text."""
    site = e.site
    return {
        **place_cells(site),
        "measured": f"{site.ratio:.3f}{interval(site)}" if site.ci else "",
        "predicted": f"{e.predicted_ratio:.3f}",
        "predicted us": f"{e.predicted_s * 1e6:.3g}",
        "bound us": "" if e.bound_s is None else f"{e.bound_s * 1e6:.3g}",
        "saves KiB": f"{e.bytes_saved / 1024:.3g}",
        "why": e.why,
        "hint": e.hint or "",
        "ends before": site.reason or "",
        "exact because": site.why_not_relaxed or "",
    }


def brief_cells(e: Explained) -> tuple[dict[str, str], tuple[str, ...]]:
    """A site for a narrow terminal; the ratio is the one that its source stands for."""
    row, below = brief(e.site)
    source = row.pop("source")
    ratio = row.pop("ratio") or f"{e.predicted_ratio:.3f}"
    bound = "" if e.bound_s is None else f"{e.bound_s * 1e6:.3g}"
    return {**row, "ratio": ratio, "us": f"{e.predicted_s * 1e6:.3g}", "bound": bound, "source": source}, below


def option_cells(option: Option) -> dict[str, str]:
    verdict = option.verdict
    return {
        "candidate": str(option.candidate),
        "predicted": f"{option.predicted_ratio:.3f}",
        "measured": f"{verdict.ratio:.3f} [{verdict.ci[0]:.3f}, {verdict.ci[1]:.3f}]" if verdict else "",
        "verdict": f"{verdict.outcome}: {verdict.why}" if verdict else "",
    }


def as_data(e: Explained) -> dict[str, Any]:
    """As JSON."""
    options = [{**asdict(option), "candidate": option.candidate.to_json()} for option in e.options]
    for option in options:
        (option["verdict"] or {}).pop("candidate", None)
    fields = ("why", "undecided", "hint", "predicted_s", "predicted_ratio", "bytes_saved", "bound_s")
    told = {name: getattr(e, name) for name in fields}
    return {**describe(e.site), **told, "options": options, "blocked": [asdict(b) for b in e.blocked]}


def measure_limits(threads: int) -> Roofline:
    from ..measure.roofline import roofline  # waits for TVM

    return roofline(threads)
