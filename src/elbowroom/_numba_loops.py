"""Machine code of plain loops over arrays, where a compiler for Python is installed; the loops themselves where not.

Machine code is kept on disk for the next process. The compiler would look at the age of a function's own file only,
and not at that of the functions it calls in others; so the folder is named after all files that hold such loops.

Compiling takes many times as long as running, and most of that is machine code around the loops: for calls from Python,
from C, for exceptions with formatted messages. So there is as little of it as can be.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from elbowroom import progress
from elbowroom._folders import find_cache, make_cache
from elbowroom.errors import UsageError

numba: Any
try:
    import numba
    import numba.core.event
except ImportError:  # everything works without, a hundred times slower
    numba = None

Function = TypeVar("Function", bound=Callable[..., Any])

IS_COMPILED = numba is not None


def compiled(function: Function) -> Function:
    """The function in machine code, made when it is first called."""
    return _compile(function)


def internal(function: Function) -> Function:
    """As `compiled`, for what only compiled functions call: it compiles faster, and a call from Python would crash."""
    return _compile(function, no_cpython_wrapper=True)


def inlined(function: Function) -> Function:
    """As `compiled`, and written out wherever it is called: a call costs 2 ns for each array that is handed on."""
    return _compile(function, inline="always")


def is_kept() -> bool:
    """Whether machine code of an earlier process is there to be loaded."""
    try:
        return any(pathlib.Path(_find_cache()).glob("**/*.nbi"))
    except (OSError, UsageError):
        return False


def _compile(function: Function, **options: Any) -> Function:
    if numba is None:
        return function
    _announce_compiling()
    options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, **options}
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = _find_cache()
        made: Function = numba.njit(function, cache=True, **options)
    except (RuntimeError, OSError, UsageError):  # nowhere to write to: compiled in every process
        made = numba.njit(function, **options)
    finally:
        numba.config.CACHE_DIR = before
    return made


@functools.cache
def _find_cache() -> str:
    """Where machine code is kept: beside the source, or in the user's cache if nobody else can write there."""
    package = pathlib.Path(__file__).parent
    stamp = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        text = path.read_bytes()
        if b"_numba_loops import" in text:
            stamp.update(text)
    near = package / "__pycache__"
    if not os.access(near if near.exists() else package, os.W_OK):
        near = find_cache()
        make_cache(near)
    return str(near / f"compiled-{stamp.hexdigest()[:16]}")


@functools.cache
def _announce_compiling() -> None:
    """Have it said from now on, once, when loops of ours are being compiled and that takes long."""

    class Announcer(numba.core.event.Listener):  # type: ignore[misc]
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
                announcement.enter_context(progress.announcing("compiling loops", _say_how(), after_seconds=patience))

        def on_end(self, event: Any) -> None:
            """It is done, or cannot be."""
            if not _is_ours(event):
                return
            self._thread.stack.pop().close()
            if not self._thread.stack:
                self._seconds += time.perf_counter() - self._thread.begin

    numba.core.event.register("numba:compile", Announcer())


def _say_how() -> str:
    try:
        folder = pathlib.Path(_find_cache())
    except (OSError, UsageError) as error:
        return f"in every process: {error}"
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if os.access(there, os.W_OK):
        return "kept for the next time; `elbowroom build` does all of it ahead"
    return f"in every process, since {there} cannot be written to; XDG_CACHE_HOME names another folder"


def _is_ours(event: Any) -> bool:
    return str(event.data["dispatcher"].py_func.__module__).startswith(__name__.partition(".")[0] + ".")
