"""The extension in C++: compiled once for each PyTorch and Python, and kept in the user's cache."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import pathlib
import platform
import sys
import sysconfig
from types import ModuleType

import torch

from elbowroom import _compiler, _folders
from elbowroom.errors import UsageError

SOURCES = pathlib.Path(__file__).parent
WHAT = "the extension that counts memory"
# As PyTorch itself is compiled: without NDEBUG its headers lay out some objects differently.
FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")
NAME = "_native"


def list_sources() -> list[pathlib.Path]:
    """List every file that the extension is made of."""
    return sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])


def find_library(folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return the extension's file, whether it is there or not: one for each source, PyTorch and Python.

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
    return (_folders.find_cache() if folder is None else folder) / f"native-{stamp.hexdigest()[:16]}.so"


def build_library(folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return the extension's file. Compile it if it is not there, which takes half a minute and a gigabyte.

    Raises:
        UsageError: there is no compiler, it does not compile, or not for this Python; others can write to the folder.
    """
    library = find_library(folder)
    if not _compiler.is_made(library):
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise UsageError(f"{WHAT} needs Python's global lock, which this Python is built without")
        parts = pathlib.Path(torch.__file__).parent
        headers = [parts / "include", parts / "include" / "torch" / "csrc" / "api" / "include"]
        includes = [f"-isystem{path}" for path in (*headers, sysconfig.get_paths()["include"])]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        linked = [f"-L{parts / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        sources = [path for path in list_sources() if path.suffix == ".cpp"]
        _compiler.compile_sources(WHAT, _compiler.CPP, library, sources, [*FLAGS, abi, *includes], linked)
    return library


@functools.cache
def load() -> ModuleType:
    """Return the extension. It is compiled first if that has not been done.

    Raises:
        UsageError: as for `build_library`, or it cannot be loaded.
    """
    library = build_library()
    spec = importlib.util.spec_from_file_location(NAME, library)
    assert spec is not None and spec.loader is not None
    try:
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    except (ImportError, OSError) as error:
        raise UsageError(f"{library} cannot be loaded: {error}. Delete it, and it is compiled anew.") from error
    return made
