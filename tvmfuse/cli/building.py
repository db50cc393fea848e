"""`tvmfuse build` and `tvmfuse run`."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

import tvmfuse

from ..compare import draw
from ..errors import UsageError
from ..files import written
from .arguments import AsJson, Fuse, Logs, Model, Numerics, Rpc, Shapes, Threads, holds_artifact, parse_shapes, parse_target
from .output import check_output, print_table, say, show


def build(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="The artifact to write.")],
    shape: Shapes = None,
    fuse: Fuse = "measured",
    threads: Threads = None,
    target: Annotated[str | None, typer.Option(help="TVM target as JSON, to compile for another CPU; by default this one.")] = None,
    rpc: Rpc = None,
    logs: Logs = None,
    numerics: Numerics = "exact",
    as_json: AsJson = False,
) -> None:
    """Compile a model into an artifact."""
    check_output(output, model)
    session = tvmfuse.build(
        model, shapes=parse_shapes(shape), target=parse_target(target), threads=threads, fuse=fuse, logs=logs, numerics=numerics, rpc=rpc
    )
    session.save(output)
    show(session.sites, as_json, artifact=str(output), kernels=session.kernel_count)
    say(f"{output}: {len(session.sites)} sites, {session.kernel_count} kernels")


def run(
    model: Annotated[Path, typer.Argument(metavar="MODEL", exists=True, dir_okay=False, help="An ONNX file or an artifact (.tvmfuse).")],
    inputs: Annotated[list[str] | None, typer.Option("--input", metavar="NAME=FILE.npy", help="One input; may be repeated.")] = None,
    random: Annotated[int | None, typer.Option(min=0, metavar="SEED", help="Draw the inputs that are not given.")] = None,
    output: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for the outputs, one .npy each.")] = None,
    shape: Shapes = None,
    fuse: Fuse = "measured",
    threads: Threads = None,
    numerics: Numerics = "exact",
    as_json: AsJson = False,
) -> None:
    """Compute a model's outputs."""
    if model.suffix == ".tvmfuse" or holds_artifact(model):
        if shape or threads or fuse != "measured" or numerics != "exact":
            raise UsageError("--shape, --fuse, --threads and --numerics were settled when the artifact was built")
        session = tvmfuse.load(model)
        made = session.manifest
        say(f"{model}: made by tvmfuse {made.toolchain.get('tvmfuse', '?')} for {made.target}; its code runs with your rights")
    else:
        session = tvmfuse.build(model, shapes=parse_shapes(shape), threads=threads, fuse=fuse, numerics=numerics)
    feeds = read_inputs(inputs or ())
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


def read_inputs(texts: Sequence[str]) -> dict[str, np.ndarray]:
    feeds: dict[str, np.ndarray] = {}
    for text in texts:
        name, value = read_input(text)
        if name in feeds:
            raise UsageError(f"--input is given twice for {name!r}: keep one of them")
        feeds[name] = value
    return feeds


def read_input(text: str) -> tuple[str, np.ndarray]:
    name, _, path = text.partition("=")
    if not path:
        raise UsageError(f"--input takes NAME=FILE.npy; not {text!r}")
    try:
        return name, np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"--input {name}: {path} can't be read as .npy: {error}") from error


def extremes(x: np.ndarray) -> dict[str, float | None]:
    """None for what is not a finite number: JSON has no NaN."""
    found = {"min": x.min(), "mean": x.mean(), "max": x.max()} if x.size else dict.fromkeys(("min", "mean", "max"), np.nan)
    return {name: float(value) if np.isfinite(value) else None for name, value in found.items()}


def write_outputs(folder: Path, results: Mapping[str, np.ndarray]) -> None:
    """One .npy each, named after the output with what a file name can't hold percent-encoded; each appears whole or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"can't write to {folder}: {error.strerror or error}") from error
    for name, value in results.items():
        with written(folder / f"{urllib.parse.quote(name, safe='')}.npy") as partial, partial.open("wb") as file:
            np.save(file, value)
