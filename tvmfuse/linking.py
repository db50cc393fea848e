"""A program that was compiled in this process becomes a library: what saving it needs the compiler for."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from tvm.support import cc
from tvm.target import Target

from .artifact import LIBRARY, Program
from .errors import UsageError
from .measure.host import is_foreign


def linker() -> str:
    """The compiler that CXX or CC names, else the first that is installed. Raises UsageError when it isn't there."""
    found = cc.get_cc()
    if not found:
        raise UsageError("no C++ compiler is there to link with: install one (Debian, Ubuntu: g++; macOS: xcode-select --install)")
    if shutil.which(found) is None:
        raise UsageError(f"CXX or CC names {found}, which is not there to link with: name a C++ compiler, or unset it")
    return found


def linked(program: Program) -> bytes:
    """The library's content. Raises UsageError."""
    with tempfile.TemporaryDirectory(prefix="tvmfuse-") as folder:
        library = Path(folder) / LIBRARY
        link(program, library)
        return library.read_bytes()


def link(program: Program, library: Path) -> None:
    """Write a program's code, which was compiled in this process, as `linker` makes it.

    A .tar gets objects, to be linked elsewhere. Raises UsageError.
    """
    by = linker() if library.suffix != ".tar" else ""
    try:
        program.module.export_library(str(library))
    except (RuntimeError, OSError) as error:
        said = str(error).splitlines()[1:]  # below TVM's heading: what the linker printed, the command
        why = next((line for line in said if line.strip()), str(error) or type(error).__name__)
        failed = f"{by} can't link a library" if by else f"can't write {library}, the objects"
        foreign = by and is_foreign(Target(json.loads(program.manifest.target)))
        advice = "; set CXX to a C++ compiler for that target, such as aarch64-linux-gnu-g++" if foreign else ""
        raise UsageError(f"{failed} for {program.manifest.cpu}: {why}{advice}") from error
