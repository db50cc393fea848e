"""`tvmfuse doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from .arguments import AsJson, Logs
from .output import counted, say


def doctor(logs: Logs = None, as_json: AsJson = False) -> None:
    """Check toolchain, CPU and noise of this machine.

    Ends with 0 unless a check fails, else with the exit code of the first that does.
    """
    from ..doctor import examine  # waits for TVM, as the next for rich
    from .tables import print_table

    findings = examine(logs)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings]))
    else:
        print_table([{"check": f.check, "verdict": f.verdict, "found": f.found, "what to do": f.fix} for f in findings])
    failed = [f for f in findings if f.verdict == "fail"]
    warned = sum(f.verdict == "warn" for f in findings)
    say(f"{counted(len(findings), 'check')}: {len(findings) - len(failed) - warned} ok, {warned} warn, {len(failed)} fail")
    if failed:
        raise typer.Exit(failed[0].exit_code)
