"""The library in C++: compiled by `elbowroom build`, once for each PyTorch, and used wherever it is there."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import pathlib
import platform
import sys
import sysconfig
from types import ModuleType

import torch

from elbowroom import _compiler, _folders
from elbowroom.errors import UsageError

logger = logging.getLogger(__name__)

SOURCES = pathlib.Path(__file__).parent
WHAT = "the library that watches ops"
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
NAME = "elbowroom._quick"


def list_sources() -> list[pathlib.Path]:
    """Every file the library is made of."""
    return sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])


def find_library(folder: pathlib.Path | None = None) -> pathlib.Path:
    """Where the library is, or would be: there is one for each source, PyTorch and Python.

    Args:
        folder: where it is kept; by default the user's cache.
    """
    stands_on = (
        torch.__version__,
        torch.version.git_version,
        torch.compiled_with_cxx11_abi(),
        sys.version,
        FLAGS,
        _compiler.SEAL_BYTES,
    )
    stamp = hashlib.sha256(repr((*stands_on, platform.machine())).encode())
    for source in list_sources():
        stamp.update(source.name.encode() + source.read_bytes())
    return (_folders.find_cache() if folder is None else folder) / f"quick-{stamp.hexdigest()[:16]}.so"


def build_library(folder: pathlib.Path | None = None) -> pathlib.Path:
    """The library's file; compiled if it is not there, which takes a compiler some twenty seconds of its
    own and a gigabyte.

    Raises:
        UsageError: there is no compiler, it does not compile, or not for this Python; others can write to the folder.
    """
    library = find_library(folder)
    if not _compiler.is_made(library):
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise UsageError(f"{WHAT} rests on Python's global lock, which this Python is without")
        parts = pathlib.Path(torch.__file__).parent
        headers = [parts / "include", parts / "include" / "torch" / "csrc" / "api" / "include"]
        includes = [f"-isystem{path}" for path in (*headers, sysconfig.get_paths()["include"])]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        linked = [f"-L{parts / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        sources = [path for path in list_sources() if path.suffix == ".cpp"]
        _compiler.compile_sources(WHAT, _compiler.CPP, library, sources, [*FLAGS, abi, *includes], linked)
    return library


@functools.cache
def load() -> ModuleType | None:
    """The library, if it has been built; said once in a process if not."""
    library = find_library()
    if not library.exists():
        logger.warning(
            "ops are watched in Python, which takes two to three times as long for each as the library does that "
            "`elbowroom build` compiles; quick=False says that this is meant to be"
        )
        return None
    try:
        if not _compiler.is_made(library):
            logger.warning("%s is damaged, so Python does without; `elbowroom build` makes it anew", library)
            return None
        spec = importlib.util.spec_from_file_location(NAME, library)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    except (ImportError, OSError, UsageError) as error:
        logger.warning("%s cannot be used, so Python does without: %s", library, error)
        return None
    return made
