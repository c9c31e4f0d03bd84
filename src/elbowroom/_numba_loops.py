"""Machine code of plain loops over arrays.

Machine code is kept on disk for the next process. The compiler would look at the age of a function's own file only,
and not at that of the functions it calls in others; so the folder is named after all files that hold such loops.

Compiling takes many times as long as running, and most of that is machine code around the loops: for calls from Python,
from C, for exceptions with formatted messages. So there is as little of it as can be.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import numba.core.codegen
import numba.core.event

from elbowroom import progress
from elbowroom._folders import find_cache, make_cache
from elbowroom.errors import UsageError

_numba: Any = numba  # parts of it have no annotations

Function = TypeVar("Function", bound=Callable[..., Any])

COMPLETE = "complete"
"""A file in the folder of machine code that says for which compiler, machine and files there is all of it."""


def compiled(function: Function) -> Function:
    """The function in machine code, made when it is first called."""
    return _compile(function)


def internal(function: Function) -> Function:
    """Compile a function that only compiled functions call: that is faster, but a call from Python would crash."""
    return _compile(function, no_cpython_wrapper=True)


def inlined(function: Function) -> Function:
    """Compile a function and inline it into each caller: a call costs 2 ns for each array argument."""
    return _compile(function, inline="always")


def is_complete() -> bool:
    """Tell whether all loops were compiled before, for this compiler and machine, and can be loaded."""
    try:
        return pathlib.Path(_find_cache(), COMPLETE).read_text() == _describe()
    except (OSError, UsageError):
        return False


def note_complete() -> None:
    """Note that all loops have been compiled. Nothing is noted where nothing can be kept."""
    with contextlib.suppress(OSError, UsageError):
        folder = pathlib.Path(_find_cache())
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{COMPLETE}-{os.getpid()}"
        new.write_text(_describe())
        new.replace(folder / COMPLETE)


def can_be_kept() -> bool:
    """Tell whether what is compiled can be written to disk."""
    try:
        return os.access(_find_parent(), os.W_OK)
    except (OSError, UsageError):
        return False


@contextlib.contextmanager
def locking_cache() -> Iterator[None]:
    """Return a context in which no other process compiles all loops, as far as processes can tell each other."""
    with ExitStack() as stack:
        with contextlib.suppress(OSError, UsageError):
            folder = pathlib.Path(_find_cache())
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(folder / "lock", "w"))
            fcntl.flock(file, fcntl.LOCK_EX)  # given back with the file, however the process ends
        yield


def say_how() -> str:
    """Say for people whether what is compiled will be kept."""
    try:
        there = _find_parent()
    except (OSError, UsageError) as error:
        return f"in every process: {error}"
    if os.access(there, os.W_OK):
        return "kept for the next time; `elbowroom build` does all of it ahead"
    return f"in every process, since {there} cannot be written to; XDG_CACHE_HOME names another folder"


def _compile(function: Function, **options: Any) -> Function:
    _announce_compiling()
    options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, **options}
    before = _numba.config.CACHE_DIR
    try:
        _numba.config.CACHE_DIR = _find_cache()
        made: Function = _numba.njit(function, cache=True, **options)
    except (RuntimeError, OSError, UsageError):  # nowhere to write to: compiled in every process
        made = _numba.njit(function, **options)
    finally:
        _numba.config.CACHE_DIR = before
    return made


@functools.cache
def _list_files() -> tuple[pathlib.Path, ...]:
    """The files that hold such loops."""
    package = pathlib.Path(__file__).parent
    return tuple(path for path in sorted(package.glob("*/**/*.py")) if b"_numba_loops import" in path.read_bytes())


@functools.cache
def _find_cache() -> str:
    """Where machine code is kept: beside the source, or in the user's cache if nobody else can write there."""
    package = pathlib.Path(__file__).parent
    stamp = hashlib.sha256()
    for path in _list_files():
        stamp.update(path.read_bytes())
    near = package / "__pycache__"
    if not os.access(near if near.exists() else package, os.W_OK):
        near = find_cache()
        make_cache(near)
    return str(near / f"compiled-{stamp.hexdigest()[:16]}")


def _find_parent() -> pathlib.Path:
    """The folder of machine code, or where it would be made."""
    folder = pathlib.Path(_find_cache())
    return next(each for each in (folder, *folder.parents) if each.exists())


def _describe() -> str:
    """Return what numba checks, beside the files' text, before it loads cached machine code."""
    newest = max(path.stat().st_mtime_ns for path in _list_files())
    machine = f"{platform.machine()} {_numba.core.codegen.ll.get_host_cpu_name()}"
    return f"numba {_numba.__version__}, {sys.implementation.cache_tag}, {machine}, files of {newest}\n"


@functools.cache
def _announce_compiling() -> None:
    """Have it said from now on, once, when loops of ours are being compiled and that takes long."""

    class Announcer(_numba.core.event.Listener):  # type: ignore[misc]
        """Told by the compiler of each function, and of those that it calls in between."""

        def __init__(self) -> None:
            self._thread, self._seconds = threading.local(), 0.0

        def on_start(self, event: Any) -> None:
            """A function is being compiled, and was not kept on disk."""
            if not _is_ours(event):
                return
            stack = self._thread.__dict__.setdefault("stack", [])
            stack.append(announcement := ExitStack())
            if len(stack) == 1:
                self._thread.begin = time.perf_counter()
                patience = max(0.0, progress.PATIENCE - self._seconds)
                announcement.enter_context(progress.announcing("compiling loops", say_how(), after_seconds=patience))

        def on_end(self, event: Any) -> None:
            """It is done, or cannot be."""
            if not _is_ours(event):
                return
            self._thread.stack.pop().close()
            if not self._thread.stack:
                self._seconds += time.perf_counter() - self._thread.begin

    _numba.core.event.register("numba:compile", Announcer())


def _is_ours(event: Any) -> bool:
    return str(event.data["dispatcher"].py_func.__module__).startswith(__name__.partition(".")[0] + ".")
