"""The command line. Results on stdout, as JSON with --json; progress and prose on stderr, and progress only on a terminal.

What fails on purpose ends with one line and the error's exit code; a traceback takes `tvmfuse --debug`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import tvmfuse

from . import compare
from . import demo as networks
from .errors import TooNoisy, TvmfuseError, UsageError
from .values import Site

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Model = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="An ONNX file.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="NAME=N[,N...]", help="Bind a free dimension (S=1) or a whole input (x=1,3,224,224); may be repeated."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of one call; by default one per core.")]
Logs = Annotated[Path | None, typer.Option(file_okay=False, help="Folder of tuning records; by default the shipped ones and your own.")]
Fuse = Annotated[Literal["measured", "always", "never"], typer.Option(help="Where epilogues are computed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Entry point; exits with the code of the error, 130 when interrupted."""
    try:
        app(prog_name="tvmfuse")
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        if isinstance(error, TvmfuseError):
            say(f"tvmfuse: {error}")
            sys.exit(error.exit_code)
        say(f"tvmfuse: internal error: {type(error).__name__}: {error}\nThe same with `tvmfuse --debug` shows where.")
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("tvmfuse"))
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Compile ONNX models for one CPU, with every epilogue's place measured on it.

    Exit codes: 0 done, 2 usage, 3 bad model, 4 unsupported, 5 made for another CPU or toolchain, 6 too noisy to decide,
    7 device, 8 check failed, 130 interrupted.
    """


@app.command()
def build(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="The artifact to write.")],
    shape: Shapes = None,
    fuse: Fuse = "measured",
    threads: Threads = None,
    target: Annotated[str | None, typer.Option(help="TVM target as JSON, to compile for another CPU; by default this one.")] = None,
    logs: Logs = None,
    as_json: AsJson = False,
) -> None:
    """Compile a model into an artifact."""
    session = tvmfuse.build(model, shapes=parse_shapes(shape), target=parse_target(target), threads=threads, fuse=fuse, logs=logs)
    session.save(output)
    show(session.sites, as_json, artifact=str(output), kernels=session.kernel_count)
    say(f"{output}: {len(session.sites)} sites, {session.kernel_count} kernels")


@app.command()
def run(
    model: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="An ONNX file or an artifact (.tvmfuse).")],
    inputs: Annotated[list[str] | None, typer.Option("--input", metavar="NAME=FILE.npy", help="One input; may be repeated.")] = None,
    random: Annotated[int | None, typer.Option(min=0, metavar="SEED", help="Draw the inputs that are not given.")] = None,
    output: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for the outputs, one .npy each.")] = None,
    shape: Shapes = None,
    fuse: Fuse = "measured",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Compute a model's outputs."""
    if model.suffix == ".tvmfuse":
        if shape or threads or fuse != "measured":
            raise UsageError("--shape, --fuse and --threads were settled when the artifact was built")
        session = tvmfuse.load(model)
    else:
        session = tvmfuse.build(model, shapes=parse_shapes(shape), threads=threads, fuse=fuse)
    feeds = dict(read_input(text) for text in inputs or ())
    if random is not None:
        rng = np.random.default_rng(random)
        feeds |= {i.name: draw(rng, i.shape, i.dtype) for i in session.get_inputs() if i.name not in feeds}
    results = {info.name: x for info, x in zip(session.get_outputs(), session.run(None, feeds), strict=True)}
    if output is not None:
        write_outputs(output, results)
    if as_json:
        typer.echo(json.dumps({name: {"shape": x.shape, "dtype": str(x.dtype), **extremes(x)} for name, x in results.items()}))
        return
    print_table(
        [
            {"output": name, "shape": "x".join(map(str, x.shape)), "dtype": str(x.dtype), **{key: str(v) for key, v in extremes(x).items()}}
            for name, x in results.items()
        ]
    )


@app.command()
def tune(
    model: Model,
    shape: Shapes = None,
    threads: Threads = None,
    budget: Annotated[str, typer.Option(help="Time to spend, such as 90s, 10m or 2h.")] = "10m",
    logs: Logs = None,
    as_json: AsJson = False,
) -> None:
    """Measure each site's placements; record the best."""
    shapes = parse_shapes(shape)
    try:
        with progress(model.name) as report:
            summary = tvmfuse.tune(model, shapes=shapes, threads=threads, budget=budget, logs=logs, progress=report)
    except KeyboardInterrupt:
        say("interrupted; what was measured is in the log")
        raise typer.Exit(130) from None
    show(summary.sites, as_json)
    say(str(summary))
    if summary.results and all(result.too_noisy for result in summary.results):
        raise TooNoisy("the A/A control was too unsteady at every site, so nothing was decided; stop what else runs here, then tune again")


@app.command()
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


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=1, help="Time to tune in all.")] = 60,
    logs: Logs = None,
    as_json: AsJson = False,
) -> None:
    """Tune DeepFilterNet3 for a minute and compare."""
    shapes, share = {"S": 1}, seconds / len(networks.NETWORKS)
    sites: dict[str, Sequence[Site]] = {}
    rows: list[compare.Row] = []
    for name in networks.NETWORKS:
        model = networks.network(name)
        feeds = networks.features(model, shapes)
        with progress(name) as report:
            summary = tvmfuse.tune(model, shapes=shapes, threads=1, budget=share, logs=logs, progress=report)
        say(f"{name}: {summary}")
        sessions = {how: tvmfuse.build(model, shapes=shapes, threads=1, fuse=how, logs=logs) for how in ("measured", "always", "never")}
        runners = {f"tvmfuse {how}": compare.bound(session, feeds) for how, session in sessions.items()}
        if importlib.util.find_spec("onnxruntime"):
            runners["onnxruntime"] = compare.onnxruntime(model, shapes, feeds, threads=1)
        rows += compare.compare(name, runners, 3, time.perf_counter)
        sites[name] = sessions["measured"].sites
        if not as_json:
            stdout().rule(name, align="left")
            print_table([{**cells(site), "this run": summary.outcome(site.workload)} for site in sites[name]])
    if as_json:
        typer.echo(
            json.dumps({"sites": {n: [describe(s) for s in found] for n, found in sites.items()}, "times": [asdict(row) for row in rows]})
        )
    else:
        typer.echo("\n" + compare.table(rows))


def say(text: str) -> None:
    typer.echo(text, err=True)


def stdout() -> Console:
    """Wide where no terminal sets a width, so that a pipe or a file gets whole lines."""
    return Console(width=None if sys.stdout.isatty() else 240, highlight=False)


@contextmanager
def progress(title: str) -> Iterator[Callable[[float, str], None]]:
    """A bar on stderr while a terminal is there; the caller reports the fraction done and what it is doing."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(title, total=1.0)
        yield lambda done, doing: bars.update(task, completed=done, description=f"{title}: {doing}")


def describe(site: Site) -> dict[str, Any]:
    """A site as JSON; the workload as its text and the hash that its records carry."""
    fields = {key: value for key, value in asdict(site).items() if key != "workload"}
    return {**fields, "workload": str(site.workload), "workload_hash": site.workload.hash()}


def cells(site: Site) -> dict[str, str]:
    """A site as a line of a table: heading -> text."""
    interval = f" [{site.ci[0]:.3f}, {site.ci[1]:.3f}]" if site.ci else ""
    return {
        "site": site.name,
        "anchor": site.anchor,
        "epilogue": " ".join(site.epilogue),
        "across": " ".join(site.crossed),
        "placement": f"{site.placement} {site.cut}/{len(site.workload.epilogue.steps)}" if site.placement else "-",
        "ratio [interval]": f"{site.ratio:.3f}{interval}" if site.ratio is not None else "",
        "source": site.source,
        "reason": site.reason or "",
    }


def show(sites: Sequence[Site], as_json: bool, **facts: object) -> None:
    if as_json:
        typer.echo(json.dumps({**facts, "sites": [describe(site) for site in sites]}))
    else:
        print_table([cells(site) for site in sites])


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    if rows:
        table = Table(*rows[0], box=None)
        for row in rows:
            table.add_row(*(escape(text) for text in row.values()))
        stdout().print(table)


def parse_shapes(texts: Sequence[str] | None) -> dict[str, int | tuple[int, ...]]:
    """["S=1", "x=1,3,8,8"] -> {"S": 1, "x": (1, 3, 8, 8)}; "x=5," binds a whole input of rank one."""
    shapes: dict[str, int | tuple[int, ...]] = {}
    for text in texts or ():
        name, _, extents = text.rpartition("=")
        try:
            parsed = tuple(int(extent) for extent in extents.removesuffix(",").split(","))
        except ValueError:
            parsed = ()
        if not name or not parsed:
            raise UsageError(f"--shape takes NAME=N or NAME=N,N,...; not {text!r}")
        shapes[name] = parsed if "," in extents else parsed[0]
    return shapes


def parse_target(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        target = json.loads(text)
    except ValueError:
        target = None
    if not isinstance(target, dict):
        raise UsageError(f'--target takes a JSON object such as {{"kind": "llvm", "mcpu": "haswell"}}; not {text!r}')
    return target


def read_input(text: str) -> tuple[str, np.ndarray]:
    name, _, path = text.partition("=")
    if not path:
        raise UsageError(f"--input takes NAME=FILE.npy; not {text!r}")
    try:
        return name, np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"--input {name}: {path} can't be read as .npy: {error}") from error


def draw(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Standard normal numbers; zeros and ones where the type is not a float."""
    kind = np.dtype(dtype)
    values = rng.standard_normal(shape) if kind.kind == "f" else rng.integers(0, 2, shape)
    return np.asarray(values, kind)


def extremes(x: np.ndarray) -> dict[str, float | None]:
    """None for what is not a finite number: JSON has no NaN."""
    found = {"min": x.min(), "mean": x.mean(), "max": x.max()} if x.size else dict.fromkeys(("min", "mean", "max"), np.nan)
    return {name: float(value) if np.isfinite(value) else None for name, value in found.items()}


def write_outputs(folder: Path, results: Mapping[str, np.ndarray]) -> None:
    """One .npy each, named after the output with what a file name can't hold percent-encoded; each appears whole or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in results.items():
            target = folder / f"{urllib.parse.quote(name, safe='')}.npy"
            partial = target.with_name(f".{target.name}.{os.getpid()}.part")
            with partial.open("wb") as file:
                np.save(file, value)
            os.replace(partial, target)
    except OSError as error:
        raise UsageError(f"can't write to {folder}: {error.strerror or error}") from error
