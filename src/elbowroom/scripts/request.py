"""Command line of `elbowroom run SCRIPT` and `python -m elbowroom.run`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

from elbowroom.config import BUDGET_VARIABLE, read_budget_variable
from elbowroom.errors import UsageError

VIEW_VARIABLE = "ELBOWROOM_VIEW"
ROOM_OPTIONS = ("mode", "policy", "strategy", "manages", "spill_folder")

_FLAGS = {"--no-view", "-h", "--help"}
_WITH_VALUES = {
    "--memory-budget",
    "--budget",
    "-o",
    "--output",
    *(f"--{name.replace('_', '-')}" for name in ROOM_OPTIONS),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptRequest:
    """A script to run, and how.

    Attributes:
        target: path of a script, or name of a module.
        is_module: whether `target` is a module.
        arguments: the script's own.
        memory_budget: as for `elbowroom.fit`.
        output: file for the journal; None for none.
        shows_view: whether to show a live view if stderr is a terminal.
        options: of the room, as for `elbowroom.fit`.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...]
    memory_budget: str
    output: pathlib.Path | None
    shows_view: bool
    options: dict[str, str]


def names_script(arguments: Sequence[str]) -> bool:
    """Tell whether arguments of `elbowroom run` name a file or a module to run, and not a workload."""
    count = _count_own(arguments)
    if count is None:  # of an option that is not known: the message says so
        return any(each == "-m" or each.endswith(".py") for each in arguments)
    if count == len(arguments):
        return False
    target = arguments[count]
    return target == "-m" or target.endswith(".py") or pathlib.Path(target).exists()


def read_request(
    arguments: Sequence[str], *, program: str, environment: Mapping[str, str] | None = None
) -> ScriptRequest:
    """Read a command line. Our options come before the script; all that follows it belongs to the script.

    Args:
        program: how the command is called, for messages.

    Raises:
        UsageError: the request is invalid.
        SystemExit: help was asked for.
    """
    environment = os.environ if environment is None else environment
    count = _count_own(arguments)
    own = [each for each in arguments[:count] if each != "--"]
    rest = list(arguments[len(arguments) if count is None else count :])
    parser = _make_parser(program)
    given = parser.parse_args(own)
    is_module = rest[:1] == ["-m"]
    rest = rest[is_module:]
    if not rest:
        raise UsageError(f"no script is given; usage: {' '.join(parser.format_usage().split()[1:])}")
    target, *passed = rest
    path = pathlib.Path(target)
    if not is_module and (path.is_dir() or not path.exists()):
        what = f"{target} is a folder; run a package with -m" if path.is_dir() else f"there is no script {target}"
        raise UsageError(what)
    budget = given.memory_budget or read_budget_variable(environment)
    if not budget:
        raise UsageError(f"no budget is given: add --memory-budget 20GiB before {target}, or set {BUDGET_VARIABLE}")
    return ScriptRequest(
        target=target,
        is_module=is_module,
        arguments=tuple(passed[passed[:1] == ["--"] :]),
        memory_budget=budget,
        output=given.output,
        shows_view=not given.no_view and environment.get(VIEW_VARIABLE, "1") != "0",
        options={name: value for name in ROOM_OPTIONS if (value := getattr(given, name)) is not None},
    )


def _count_own(arguments: Sequence[str]) -> int | None:
    """Count the arguments before the script; None if one of them is unknown."""
    index = 0
    while index < len(arguments):
        each = arguments[index]
        if each == "--":
            index += 1
            break
        if each == "-m" or not each.startswith("-"):
            break
        name, has_value, _ = each.partition("=")
        if name in _WITH_VALUES:
            index += 1 if has_value else 2
        elif each in _FLAGS:
            index += 1
        else:
            return None
    return min(index, len(arguments))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise UsageError(message)


def _make_parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program,
        usage=f"{program} --memory-budget SIZE [options] (SCRIPT.py | -m MODULE) [--] [ARGUMENTS]",
        description="Run an unchanged training script within a memory budget.",
        epilog="Exit code: the script's own; 3 if no plan fits the budget.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--memory-budget",
        "--budget",
        metavar="SIZE",
        help=f"8GiB, 8GB, 60%% of the device, or shared; or {BUDGET_VARIABLE}",
    )
    parser.add_argument("-o", "--output", type=pathlib.Path, metavar="FILE", help="write the journal to this file")
    parser.add_argument("--no-view", action="store_true", help=f"show no live view; or {VIEW_VARIABLE}=0")
    for name in ROOM_OPTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", help=f"as `{name}` of elbowroom.fit")
    return parser
