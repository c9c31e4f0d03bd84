"""Machine code of plain loops over arrays, where a compiler for Python is installed; the loops themselves where not.

Machine code is kept on disk for the next process. The compiler would look at the age of a function's own file only,
and not at that of the functions it calls in others; so the folder is named after all files that hold such loops.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

from elbowroom._folders import find_cache, make_cache
from elbowroom.errors import UsageError

numba: Any
try:
    import numba
except ImportError:  # everything works without, a hundred times slower
    numba = None

Function = TypeVar("Function", bound=Callable[..., Any])

IS_COMPILED = numba is not None


def compiled(function: Function) -> Function:
    """The function in machine code, made when it is first called."""
    return _compile(function)


def inlined(function: Function) -> Function:
    """As `compiled`, and written out wherever it is called: a call costs 2 ns for each array that is handed on."""
    return _compile(function, inline="always")


def _compile(function: Function, **options: Any) -> Function:
    if numba is None:
        return function
    before = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = _find_cache()
        made: Function = numba.njit(function, cache=True, nogil=True, error_model="numpy", **options)
    except (RuntimeError, OSError, UsageError):  # nowhere to write to: compiled in every process
        made = numba.njit(function, nogil=True, error_model="numpy", **options)
    finally:
        numba.config.CACHE_DIR = before
    return made


@functools.cache
def _find_cache() -> str:
    """Where machine code is kept: beside the source, or in the user's cache if nobody else can write there."""
    package = pathlib.Path(__file__).parent
    stamp = hashlib.sha256()
    for path in sorted(package.glob("*/*.py")):
        text = path.read_bytes()
        if b"_compiled import" in text:
            stamp.update(text)
    near = package / "__pycache__"
    if not os.access(near if near.exists() else package, os.W_OK):
        near = find_cache()
        make_cache(near)
    return str(near / f"compiled-{stamp.hexdigest()[:16]}")
