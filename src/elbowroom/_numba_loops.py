"""Compiles loops over arrays with numba and caches the machine code on disk.

numba's cache checks the age of a function's own file only, not of the files of functions that it calls. So the cache
folder's name is a digest of all files with such loops.

Compiling takes many times as long as running, mostly for the wrappers around the loops: for calls from Python and from
C, and for exceptions with formatted messages. So as few of these are generated as possible.
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
"""File in the cache folder that names the compiler, machine and files for which the cache is complete."""


def compiled(function: Function) -> Function:
    """Compile a function when it is first called."""
    return _compile(function)


def internal(function: Function) -> Function:
    """Compile a function that only compiled functions call. Compiles faster, but a call from Python would crash."""
    return _compile(function, no_cpython_wrapper=True)


def inlined(function: Function) -> Function:
    """Compile a function and inline it into each caller, since a call costs 2 ns per array argument."""
    return _compile(function, inline="always")


def is_complete() -> bool:
    """Tell whether the cache holds all loops for this compiler and machine."""
    try:
        return pathlib.Path(_find_cache(), COMPLETE).read_text() == _describe()
    except (OSError, UsageError):
        return False


def note_complete() -> None:
    """Note on disk, if it is writable, that all loops have been compiled."""
    with contextlib.suppress(OSError, UsageError):
        folder = pathlib.Path(_find_cache())
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{COMPLETE}-{os.getpid()}"
        new.write_text(_describe())
        new.replace(folder / COMPLETE)


def can_be_kept() -> bool:
    """Tell whether the cache can be written to."""
    try:
        return os.access(_find_parent(), os.W_OK)
    except (OSError, UsageError):
        return False


@contextlib.contextmanager
def locking_cache() -> Iterator[None]:
    """Return a context in which no other process compiles all loops, if the cache is writable."""
    with ExitStack() as stack:
        with contextlib.suppress(OSError, UsageError):
            folder = pathlib.Path(_find_cache())
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(folder / "lock", "w"))
            fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, however the process ends
        yield


def say_how() -> str:
    """Describe for the progress message whether the machine code will be kept."""
    try:
        there = _find_parent()
    except (OSError, UsageError) as error:
        return f"in every process: {error}"
    if os.access(there, os.W_OK):
        return "kept for the next time; `elbowroom build` compiles all of it ahead"
    return f"in every process, since {there} is not writable; set XDG_CACHE_HOME to use another folder"


def _compile(function: Function, **options: Any) -> Function:
    _announce_compiling()
    options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, **options}
    before = _numba.config.CACHE_DIR
    try:
        _numba.config.CACHE_DIR = _find_cache()
        made: Function = _numba.njit(function, cache=True, **options)
    except (RuntimeError, OSError, UsageError):  # no writable folder: compile in every process
        made = _numba.njit(function, **options)
    finally:
        _numba.config.CACHE_DIR = before
    return made


@functools.cache
def _list_files() -> tuple[pathlib.Path, ...]:
    """List the files that contain such loops."""
    package = pathlib.Path(__file__).parent
    return tuple(path for path in sorted(package.glob("*/**/*.py")) if b"_numba_loops import" in path.read_bytes())


@functools.cache
def _find_cache() -> str:
    """Return the folder of the machine code: beside the source, else in the user's private cache."""
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
    """Return the folder of the machine code, or its nearest existing parent."""
    folder = pathlib.Path(_find_cache())
    return next(each for each in (folder, *folder.parents) if each.exists())


def _describe() -> str:
    """Return what numba checks, besides the files' text, before it loads cached machine code."""
    newest = max(path.stat().st_mtime_ns for path in _list_files())
    machine = f"{platform.machine()} {_numba.core.codegen.ll.get_host_cpu_name()}"
    return f"numba {_numba.__version__}, {sys.implementation.cache_tag}, {machine}, files of {newest}\n"


@functools.cache
def _announce_compiling() -> None:
    """Show a message from now on when compiling our loops takes long."""

    class Announcer(_numba.core.event.Listener):  # type: ignore[misc]
        """Listener of compile events. Events of the functions that a function calls are nested in its own."""

        def __init__(self) -> None:
            self._thread, self._seconds = threading.local(), 0.0

        def on_start(self, event: Any) -> None:
            """Show the message, after a delay, when a function that is not in the cache is compiled."""
            if not _is_ours(event):
                return
            stack = self._thread.__dict__.setdefault("stack", [])
            stack.append(announcement := ExitStack())
            if len(stack) == 1:
                self._thread.begin = time.perf_counter()
                patience = max(0.0, progress.PATIENCE - self._seconds)
                announcement.enter_context(progress.announcing("compiling loops", say_how(), after_seconds=patience))

        def on_end(self, event: Any) -> None:
            """Remove the message when compilation has ended or failed."""
            if not _is_ours(event):
                return
            self._thread.stack.pop().close()
            if not self._thread.stack:
                self._seconds += time.perf_counter() - self._thread.begin

    _numba.core.event.register("numba:compile", Announcer())


def _is_ours(event: Any) -> bool:
    return str(event.data["dispatcher"].py_func.__module__).startswith(__name__.partition(".")[0] + ".")
