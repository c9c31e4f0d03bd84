"""Compiles and loads `arena_module.cpp`: the CPU arena by itself, and as PyTorch's allocator."""

from __future__ import annotations

import ctypes
import functools
import mmap
import pathlib
from types import ModuleType

import elbowroom
from elbowroom.native import library

NAME = "_arena_for_tests"
SOURCES = pathlib.Path(elbowroom.__file__).parent / "native"
PARTS = ("arena", "arena_segments", "segments", "pages", "bind_arena")


@functools.cache
def load() -> ModuleType:
    """The module; compiled once for each source and PyTorch.

    Raises:
        UsageError: there is no compiler, or it does not compile.
    """
    files = [SOURCES / f"{part}{suffix}" for part in PARTS for suffix in (".cpp", ".h")]
    sources = [pathlib.Path(__file__).with_suffix(".cpp"), *(file for file in files if file.suffix == ".cpp")]
    headers = [file for file in files if file.suffix == ".h" and file.exists()]
    return library.load(library.Extension(NAME, "the arena for tests", tuple(sources), tuple(headers)))


def occupy(begin: int, nbytes: int) -> None:
    """Map something else at an address, without access."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed, reserves_nothing = 0x10, 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed | reserves_nothing
    assert libc.mmap(begin, nbytes, 0, flags, -1, 0) == begin
