"""Runs a script or a module as `__main__`, within a budget."""

from __future__ import annotations

import builtins
import concurrent.futures.thread
import importlib.util
import io
import os
import pathlib
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

from elbowroom.errors import ElbowroomError, UsageError
from elbowroom.scripts.exit_codes import FAILED, INTERRUPTED, find_cause, find_exit_code
from elbowroom.scripts.request import ScriptRequest, read_request

NOTHING_FOUND = (
    "no training step was found, so nothing was managed: no torch.optim optimizer made a step in this process. "
    "Processes that the script forks are managed, each within the whole budget; others are not: start them with "
    "torchrun -m elbowroom.run"
)


def main(arguments: Sequence[str], *, program: str) -> int:
    """Run the script of a command line. Return its exit code, or one of ours.

    Raises:
        SystemExit: raised by the script, or help was asked for.
    """
    try:
        return run_script(read_request(arguments, program=program))
    except UsageError as error:
        complain(str(error))
        return find_exit_code(error)


def run_script(request: ScriptRequest) -> int:
    """Run a script within its budget. Return its exit code.

    Raises:
        UsageError: the request is invalid; the script has not run.
        SystemExit: raised by the script.
    """
    code, module = _load(request)
    program = _make_program(request)
    sys.argv = [request.target if not request.is_module else str(module.__file__), *request.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if request.is_module else str(pathlib.Path(request.target).resolve().parent)
    sys.modules["__main__"] = module
    program.open()
    failure: BaseException | None = None
    try:
        try:
            exec(code, vars(module))
        except SystemExit as error:
            failure = error
        _wait_for_threads()
    except BaseException as error:
        failure = error
    is_exit = isinstance(failure, SystemExit)
    try:
        program.close(None if is_exit else failure)
    except ElbowroomError as error:  # the last step ends only now
        return _report(failure if failure is not None and not is_exit else error)
    if failure is not None and not is_exit:
        return _report(failure)
    has_failed = isinstance(failure, SystemExit) and failure.code not in (None, 0)
    if not (program.rooms or program.has_own_rooms or has_failed):
        complain(NOTHING_FOUND)
    if failure is not None:
        raise failure
    return 0


def _wait_for_threads() -> None:
    """Wait for the script's threads, as Python does when a program ends. Threads of executors may be idle for ever."""
    idle = concurrent.futures.thread._threads_queues
    while running := [
        each
        for each in threading.enumerate()
        if each is not threading.current_thread() and not each.daemon and each not in idle
    ]:
        for each in running:
            each.join()


def complain(message: str) -> None:
    """Print a message on stderr."""
    print(f"elbowroom: {message}", file=sys.stderr)


def _make_program(request: ScriptRequest) -> Any:
    from elbowroom._family import get
    from elbowroom.config import read_config
    from elbowroom.native import library
    from elbowroom.planner.options import find_strategy
    from elbowroom.residency import policies
    from elbowroom.scripts.journal_file import JournalFile
    from elbowroom.scripts.live_view import LiveView
    from elbowroom.scripts.managed_program import ManagedProgram
    from elbowroom.tiers.disk import SpillFile
    from elbowroom.units import parse_bytes

    options: dict[str, Any] = dict(request.options)
    read_config(**options)
    if "strategy" in options:
        find_strategy(options["strategy"])
    if "policy" in options:
        get(policies, options["policy"], "Policy")
    if "spill_folder" in options:
        SpillFile(options["spill_folder"]).close()
    try:
        if request.memory_budget != "shared":
            parse_bytes(request.memory_budget, device_bytes=1 << 40)
    except ValueError as error:
        raise UsageError(f"--memory-budget: {error}") from error
    library.load()  # compiled now, and not in the middle of the script's first step
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    return ManagedProgram(
        request.memory_budget,
        options,
        journal_file=None if request.output is None else JournalFile(request.output),
        view=LiveView() if request.shows_view and is_first and sys.stderr.isatty() else None,
    )


def _report(error: BaseException) -> int:
    """Print why a script ended. Return the exit code."""
    cause = find_cause(error)
    if cause is error:
        complain(str(error))
        return find_exit_code(cause)
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next  # without our own frame
    sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return FAILED if cause is None else find_exit_code(cause)


def _load(request: ScriptRequest) -> tuple[types.CodeType, types.ModuleType]:
    """Compile the program, and make the module that it runs in."""
    module = types.ModuleType("__main__")
    vars(module)["__builtins__"] = builtins
    if request.is_module:
        return _load_module(request.target, module), module
    path = pathlib.Path(request.target)
    module.__file__ = str(path.resolve())
    with io.open_code(str(path)) as file:
        source = file.read()
    try:
        code = compile(source, module.__file__, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is not a Python file: {error}") from error
    return code, module


def _load_module(name: str, module: types.ModuleType) -> types.CodeType:
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise UsageError(f"-m {name}: {error}") from error
    finally:
        if not sys.flags.safe_path:
            del sys.path[0]
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        raise UsageError(f"-m {name}: there is no such module, or it has no code to run")
    module.__spec__ = spec
    module.__loader__ = spec.loader
    module.__package__ = spec.parent
    module.__file__ = spec.origin
    assert isinstance(code, types.CodeType)
    return code
