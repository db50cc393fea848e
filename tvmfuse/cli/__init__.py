"""The command line. Results on stdout, as JSON with --json; progress and prose on stderr, and progress only on a terminal.

What fails on purpose ends with one line and the error's exit code; a traceback takes `tvmfuse --debug`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import typer

from ..errors import TvmfuseError
from . import log
from .building import build, run
from .checking import check
from .demonstrating import demo
from .diagnosing import doctor
from .explaining import explain
from .output import say
from .reporting import report
from .serving import serve
from .timing import bench
from .tuning import tune

# What the parser raises; typer exports only this subclass of it
WRONG_USE: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def main(interrupted: Callable[[], bool] = lambda: False) -> None:
    """Entry point; exits with the code of the error, 130 when interrupted.

    interrupted  whether Ctrl-C was pressed: of an exception within one of its callbacks TVM makes another error.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("once", category=UserWarning)
        warnings.showwarning = lambda message, *_, **__: say(f"tvmfuse: warning: {one_line(str(message))}")
        try:
            sys.exit(app(prog_name="tvmfuse", standalone_mode=False))
        except WRONG_USE as error:
            say(wrong_use(error))
            sys.exit(2)
        except Exception as error:
            if interrupted():
                raise KeyboardInterrupt from error
            if "--debug" in sys.argv:
                raise
            if isinstance(error, TvmfuseError):
                say(f"tvmfuse: {one_line(error.command_line)}")
                sys.exit(error.exit_code)
            said = f"{type(error).__name__}: {error}"
            say(f"tvmfuse: internal error: {one_line(said)}; the same with `tvmfuse --debug` shows where")
            sys.exit(1)


def one_line(text: str) -> str:
    """Lines become items that semicolons part; a heading keeps its colon."""
    heading, *items = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return f"{heading} {'; '.join(items)}" if heading.endswith(":") else "; ".join([heading, *items])


def wrong_use(error: Exception) -> str:
    """One line; the help text where a command was called with nothing at all."""
    text, context = error.format_message(), error.ctx  # type: ignore[attr-defined]
    if type(error).__name__ == "NoArgsIsHelpError":
        return text
    said = one_line(text).replace("Value error, ", "").rstrip(".")  # the prefix of the library that checks choices for typer
    command = context.command_path if context else " ".join(["tvmfuse", *[word for word in sys.argv[1:] if not word.startswith("-")][:1]])
    return f"tvmfuse: {said}; see `{command} --help`"


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata  # --help doesn't wait for it

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


for command in (build, run, tune, bench, explain, report, check, demo, doctor, serve):
    app.command()(command)
app.add_typer(log.app, name="log", help="Look after tuning logs: stats, verify, compact, merge.")
