"""What commands write where, results to stdout and prose to stderr; and a site in words."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import UsageError
from ..files import check_own, check_replaceable

if TYPE_CHECKING:
    from ..values import Site


def check_output(path: Path, model: Path, head: bytes, kind: str) -> None:
    """Before anything is computed: raises UsageError for a file that couldn't be written, or that would replace the model or its weights.

    head  how files of this kind begin.
    """
    if not path.parent.is_dir():
        raise UsageError(f"can't write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"can't write {path}: the folder {path.parent} is read-only")
    check_replaceable(path)
    if path.exists() and path.samefile(model):
        raise UsageError(f"{path} is the model itself; write to another file")
    check_own(path, head, kind)


def say(text: str) -> None:
    typer.echo("\n".join(map(visible, text.split("\n"))), err=True)


def counted(number: int, what: str) -> str:
    """1 site, 2 sites."""
    return f"{number} {what}{'s' * (number != 1)}"


def visible(text: str) -> str:
    """Names come from the model: what would steer the terminal is written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def describe(site: Site) -> dict[str, Any]:
    """A site as JSON; the workload as its text and the hash that its records carry."""
    fields = {key: value for key, value in asdict(site).items() if key != "workload"}
    return {**fields, "workload": str(site.workload), "workload_hash": site.workload.hash()}


def placed(site: Site) -> str:
    """Where the epilogue is computed, and how many of its steps."""
    return f"{site.placement} {site.cut}/{len(site.workload.epilogue.steps)}" if site.placement else "-"


def place_cells(site: Site) -> dict[str, str]:
    """What a site is and where it is computed: heading -> text."""
    return {
        "site": site.name,
        "anchor": anchor(site),
        "epilogue": " ".join(site.epilogue),
        "across": " ".join(site.crossed),
        "placement": placed(site),
    }


def interval(site: Site) -> str:
    """Behind a ratio; empty where none was measured."""
    return f" [{site.ci[0]:.3f}, {site.ci[1]:.3f}]" if site.ci else ""


def cells(site: Site) -> dict[str, str]:
    """A site as a line of a table: heading -> text."""
    return {
        **place_cells(site),
        "ratio [interval]": f"{site.ratio:.3f}{interval(site)}" if site.ratio is not None else "",
        "source": site.source,
        "reason": site.reason or "",
        "exact because": site.why_not_relaxed or "",
    }


def brief(site: Site, *more: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """A site for a narrow terminal: a few columns, and below them what is computed, and more."""
    ratio = "" if site.ratio is None else f"{site.ratio:.3f}"
    return {"site": site.name, "placement": placed(site), "ratio": ratio, "source": site.source}, (computed(site), *more)


def computed(site: Site) -> str:
    """Anchor, epilogue, and what that moved across."""
    across = f", across {' '.join(site.crossed)}" if site.crossed else ""
    return " | ".join(filter(None, (anchor(site), " ".join(site.epilogue)))) + across


def anchor(site: Site) -> str:
    """What is computed, with the algorithm of the relaxed class and what was measured of its error."""
    if site.algorithm is None:
        return site.anchor
    return f"{site.anchor} by {site.algorithm} ({'unmeasured' if site.relative_error is None else f'error {site.relative_error:.1e}'})"


def show(sites: Sequence[Site], as_json: bool, **facts: object) -> None:
    if as_json:
        typer.echo(json.dumps({**facts, "sites": [describe(site) for site in sites]}))
    else:
        from .tables import print_table  # waits for rich

        print_table([cells(site) for site in sites], [brief(site) for site in sites])
