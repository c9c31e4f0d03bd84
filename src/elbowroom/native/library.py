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
NATIVE, OBSERVER = "_native", "_observer"
"""The extensions: the one that every room uses, and the observer of ops, which no room uses yet."""

WHAT = {NATIVE: "the extension that counts memory", OBSERVER: "the extension that observes ops"}
# As PyTorch itself is compiled: without NDEBUG its headers lay out some objects differently.
FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")


def list_sources(name: str = NATIVE) -> list[pathlib.Path]:
    """List every file that an extension is made of."""
    folder = SOURCES if name == NATIVE else SOURCES / "observer"
    return sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])


def find_library(folder: pathlib.Path | None = None, name: str = NATIVE) -> pathlib.Path:
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
    for source in list_sources(name):
        stamp.update(source.name.encode() + source.read_bytes())
    return (_folders.find_cache() if folder is None else folder) / f"{name[1:]}-{stamp.hexdigest()[:16]}.so"


def build_library(folder: pathlib.Path | None = None, name: str = NATIVE) -> pathlib.Path:
    """Return the extension's file. Compile it if it is not there, which takes half a minute and a gigabyte.

    Raises:
        UsageError: there is no compiler, it does not compile, or not for this Python; others can write to the folder.
    """
    library = find_library(folder, name)
    if not _compiler.is_made(library):
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise UsageError(f"{WHAT[name]} needs Python's global lock, which this Python is built without")
        parts = pathlib.Path(torch.__file__).parent
        headers = [parts / "include", parts / "include" / "torch" / "csrc" / "api" / "include"]
        includes = [f"-isystem{path}" for path in (*headers, sysconfig.get_paths()["include"])]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        linked = [f"-L{parts / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        sources = [path for path in list_sources(name) if path.suffix == ".cpp"]
        _compiler.compile_sources(WHAT[name], _compiler.CPP, library, sources, [*FLAGS, abi, *includes], linked)
    return library


@functools.cache
def load(name: str = NATIVE) -> ModuleType:
    """Return an extension. It is compiled first if that has not been done.

    Raises:
        UsageError: as for `build_library`, or it cannot be loaded.
    """
    library = build_library(name=name)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None and spec.loader is not None
    try:
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    except (ImportError, OSError) as error:
        raise UsageError(f"{library} cannot be loaded: {error}. Delete it, and it is compiled anew.") from error
    return made
