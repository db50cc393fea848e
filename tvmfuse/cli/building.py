"""`tvmfuse build` and `tvmfuse run`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import tvmfuse

from ..errors import UsageError
from .arguments import AsJson, Fuse, Logs, Model, Numerics, Rpc, Shapes, Threads, holds_artifact, parse_shapes, parse_target
from .output import check_output, counted, say, show


def build(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", dir_okay=False, help="The artifact to write.")],
    shape: Shapes = None,
    fuse: Fuse = "measured",
    threads: Threads = None,
    target: Annotated[str | None, typer.Option(help="TVM target as JSON, to compile for another CPU; by default this one.")] = None,
    rpc: Rpc = None,
    host: Annotated[
        str | None, typer.Option(metavar="KEY", help="Compile for a CPU that the log has records of; its file there is called KEY.jsonl.")
    ] = None,
    logs: Logs = None,
    numerics: Numerics = "exact",
    as_json: AsJson = False,
) -> None:
    """Compile a model into an artifact."""
    check_output(output, model, b"PK", "compiled model")
    session = tvmfuse.build(
        model,
        shapes=parse_shapes(shape),
        target=parse_target(target),
        threads=threads,
        fuse=fuse,
        logs=logs,
        numerics=numerics,
        rpc=rpc,
        host=host,
    )
    session.save(output)
    show(session.sites, as_json, artifact=str(output), kernels=session.kernel_count)
    say(f"{output}: {counted(len(session.sites), 'site')}, {counted(session.kernel_count, 'kernel')}")


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
    from . import arrays  # waits for NumPy

    feeds = arrays.read(inputs or ())
    if model.suffix == ".tvmfuse" or holds_artifact(model):
        if shape or threads or fuse != "measured" or numerics != "exact":
            raise UsageError("--shape, --fuse, --threads and --numerics were settled when the artifact was built")
        session = tvmfuse.load(model)
        made = session.manifest
        say(f"{model}: made by tvmfuse {made.toolchain.get('tvmfuse', '?')} for {made.cpu}; its code runs with your rights")
    else:
        session = tvmfuse.build(model, shapes=parse_shapes(shape), threads=threads, fuse=fuse, numerics=numerics)
    if random is not None:
        feeds |= arrays.drawn([info for info in session.get_inputs() if info.name not in feeds], random)
    results = {info.name: x for info, x in zip(session.get_outputs(), session.run(None, feeds), strict=True)}
    if output is not None:
        arrays.write(output, results)
    told = {name: arrays.described(x) for name, x in results.items()}
    if as_json:
        typer.echo(json.dumps(told))
        return
    from .tables import print_table  # waits for rich

    rows = [{"output": name, **facts, "shape": "x".join(map(str, facts["shape"]))} for name, facts in told.items()]
    print_table([{key: f"{value:.6g}" if isinstance(value, float) else str(value) for key, value in row.items()} for row in rows])
