"""The arguments and options that commands share, and what their texts mean."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..errors import UsageError


def _onnx(path: Path) -> Path:
    if holds_artifact(path):
        raise UsageError(f"{path} is a tvmfuse artifact, not an ONNX model; `tvmfuse run {path}` runs it")
    return path


Model = Annotated[Path, typer.Argument(callback=_onnx, metavar="MODEL", exists=True, dir_okay=False, help="An ONNX file.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="NAME=N[,N...]", help="Bind a free dimension (S=1) or a whole input (x=1,3,224,224); may be repeated."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of one call; by default one per core.")]
Logs = Annotated[Path | None, typer.Option(file_okay=False, help="Folder of tuning records; by default the shipped ones and your own.")]
Fuse = Annotated[Literal["measured", "always", "never"], typer.Option(help="Where epilogues are computed.")]
Numerics = Annotated[
    Literal["exact", "relaxed"], typer.Option(help="relaxed: 3x3 convolutions may take Winograd's algorithm, whose bits are its own.")
]
Rpc = Annotated[str | None, typer.Option(metavar="HOST:PORT/KEY", help="A TVM RPC tracker and a key: devices there, not this CPU.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def holds_artifact(path: Path) -> bool:
    """By content, whatever the file is called."""
    if not path.is_file() or not zipfile.is_zipfile(path):  # a pipe would be waited for, a device read without end
        return False
    from ..artifact import is_artifact  # waits for NumPy

    return is_artifact(path)


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
        if name in shapes:
            raise UsageError(f"--shape is given twice for {name!r}: keep one of them")
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
