"""Compiles and loads `arena_module.cpp`: the CPU arena by itself, and as PyTorch's allocator."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import mmap
import pathlib
import sysconfig
from types import ModuleType

import torch

import elbowroom
from elbowroom import _compiler, _folders

NAME = "_arena_for_tests"
FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
SOURCES = pathlib.Path(elbowroom.__file__).parent / "native"
PARTS = ("arena", "arena_segments", "segments", "pages", "bind_arena")


def list_sources() -> list[pathlib.Path]:
    """The files that are compiled."""
    return [pathlib.Path(__file__).with_suffix(".cpp"), *(SOURCES / f"{part}.cpp" for part in PARTS)]


@functools.cache
def load() -> ModuleType:
    """The module; compiled once for each source and PyTorch.

    Raises:
        UsageError: there is no compiler, or it does not compile.
    """
    headers = [SOURCES / f"{part}.h" for part in PARTS if (SOURCES / f"{part}.h").exists()]
    stamp = hashlib.sha256(repr((torch.__version__, torch.compiled_with_cxx11_abi(), FLAGS)).encode())
    for source in [*list_sources(), *headers]:
        stamp.update(source.read_bytes())
    made = _folders.find_cache() / f"{NAME}-{stamp.hexdigest()[:16]}.so"
    if not _compiler.is_made(made):
        parts = pathlib.Path(torch.__file__).parent
        includes = [f"-isystem{path}" for path in (parts / "include", sysconfig.get_paths()["include"])]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        linked = [f"-L{parts / 'lib'}", "-lc10"]
        flags = [*FLAGS, abi, f"-I{SOURCES}", *includes]
        _compiler.compile_sources("the arena for tests", _compiler.CPP, made, list_sources(), flags, linked)
    spec = importlib.util.spec_from_file_location(NAME, made)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def occupy(begin: int, nbytes: int) -> None:
    """Map something else at an address, without access."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    fixed, reserves_nothing = 0x10, 0x4000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed | reserves_nothing
    assert libc.mmap(begin, nbytes, 0, flags, -1, 0) == begin
