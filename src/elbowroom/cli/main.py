"""The program `elbowroom`: registers its commands, and turns errors into messages and exit codes.

0    success
1    failure, or the demo found a difference
2    invalid request: a malformed budget, an unknown name, a damaged file
3    no plan fits the budget
130  interrupted with Ctrl-C
"""

from __future__ import annotations

import errno
import importlib.metadata
import inspect
import os
import pathlib
import platform
import sysconfig
import traceback
import types
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from elbowroom import __version__, _family
from elbowroom.cli import commands
from elbowroom.errors import ElbowroomError
from elbowroom.scripts.exit_codes import FAILED, INTERRUPTED, MISUSED, find_exit_code

NEEDS_TORCH = (
    "this needs PyTorch, which is not installed here: pip install 'elbowroom[torch]'. Without it, files are read, and "
    "planned for a machine that --hardware names, such as --hardware rtx3090"
)


class Program(typer.core.TyperGroup):
    """Group of all commands; the only place where errors are printed."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command.

        Raises:
            typer.Exit: with the exit code of the error, once its message is on stderr.
        """
        try:
            return super().invoke(ctx)
        except ElbowroomError as error:
            _complain(str(error))
            raise typer.Exit(find_exit_code(error)) from error
        except KeyboardInterrupt as error:
            _complain("interrupted")
            raise typer.Exit(INTERRUPTED) from error
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "torch":
                _complain(NEEDS_TORCH)
                raise typer.Exit(MISUSED) from error
            if isinstance(error, OSError) and error.errno in (errno.EIO, errno.ENOSPC):
                raise _fail_to_write(error) from error
            if (begin := _find_workload(error.__traceback__)) is None:
                raise
            traceback.print_exception(type(error), error, begin)
            raise typer.Exit(FAILED) from error


def make_app() -> typer.Typer:
    """Return the program with all its commands."""
    app = typer.Typer(
        name="elbowroom",
        cls=Program,
        help="Fit PyTorch training into the memory you have.",
        no_args_is_help=True,
        # Any other error is a bug: show Python's plain traceback, without pages of local variables.
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_describe)
    for name in _family.names(commands):
        _family.get(commands, name, "register")(app)
    for command in app.registered_commands:
        paragraphs = (inspect.getdoc(command.callback) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)  # the terminal breaks lines anew
    return app


def main() -> None:
    """Run the program: the entry point of the console script `elbowroom`."""
    # transformers otherwise logs a line for every model that it does not know.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    make_app()(prog_name="elbowroom")


def _find_workload(frame: types.TracebackType | None) -> types.TracebackType | None:
    """Return the first frame of the user's own code, such as a workload's; None if there is none."""
    paths = sysconfig.get_paths()
    installed = (str(pathlib.Path(__file__).parents[1]), paths["stdlib"], paths["purelib"], paths["platlib"], "<frozen")
    while frame is not None and frame.tb_frame.f_code.co_filename.startswith(installed):
        frame = frame.tb_next
    return frame


def _fail_to_write(error: OSError) -> typer.Exit:
    _complain(f"cannot write the output: {error.strerror}")
    return typer.Exit(FAILED)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        # Importing torch would take seconds.
        try:
            pytorch = f"PyTorch {importlib.metadata.version('torch')}"
        except importlib.metadata.PackageNotFoundError:
            pytorch = "no PyTorch"
        try:
            typer.echo(f"elbowroom {__version__}, {pytorch}, Python {platform.python_version()}")
        except OSError as error:
            raise _fail_to_write(error) from error
        raise typer.Exit


def _describe(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions of Elbowroom, PyTorch and Python.",
            is_eager=True,
            callback=_show_version,
        ),
    ] = False,
) -> None:
    """Fit PyTorch training into the memory you have."""


def _complain(message: str) -> None:
    text = Text.assemble(("elbowroom: ", "bold red"), message)
    console = Console(stderr=True)
    console.print(text, soft_wrap=not console.is_terminal)
