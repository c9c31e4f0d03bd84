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
from typing import NamedTuple

import torch

from elbowroom import _compiler, _folders
from elbowroom.errors import UsageError

# As PyTorch itself is compiled: without NDEBUG its headers lay out some objects differently.
FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")


class Extension(NamedTuple):
    """An extension module.

    Attributes:
        name: of the module.
        what: it is, for messages.
        folder: of its sources.
    """

    name: str
    what: str
    folder: pathlib.Path


NATIVE = Extension("_native", "the extension that counts memory", pathlib.Path(__file__).parent)
"""Used by every room on a CPU."""


def list_sources(extension: Extension) -> list[pathlib.Path]:
    """List every file that an extension is made of."""
    return sorted([*extension.folder.glob("*.cpp"), *extension.folder.glob("*.h")])


def find_library(extension: Extension, folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return an extension's file, whether it is there or not: one for each source, PyTorch and Python.

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
    for source in list_sources(extension):
        stamp.update(source.name.encode() + source.read_bytes())
    return (_folders.find_cache() if folder is None else folder) / f"{extension.name[1:]}-{stamp.hexdigest()[:16]}.so"


def build_library(extension: Extension, folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return an extension's file. Compile it if it is not there, which takes half a minute and a gigabyte.

    Raises:
        UsageError: there is no compiler, it does not compile, or not for this Python; others can write to the folder.
    """
    library = find_library(extension, folder)
    if not _compiler.is_made(library):
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise UsageError(f"{extension.what} needs Python's global lock, which this Python is built without")
        parts = pathlib.Path(torch.__file__).parent
        headers = [parts / "include", parts / "include" / "torch" / "csrc" / "api" / "include"]
        includes = [f"-isystem{path}" for path in (*headers, sysconfig.get_paths()["include"])]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        linked = [f"-L{parts / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
        sources = [path for path in list_sources(extension) if path.suffix == ".cpp"]
        _compiler.compile_sources(extension.what, _compiler.CPP, library, sources, [*FLAGS, abi, *includes], linked)
    return library


def import_library(extension: Extension, library: pathlib.Path) -> ModuleType:
    """Import an extension from its file.

    Raises:
        ImportError, OSError: it cannot be loaded.
    """
    spec = importlib.util.spec_from_file_location(extension.name, library)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@functools.cache
def load(extension: Extension = NATIVE) -> ModuleType:
    """Return an extension. It is compiled first if that has not been done.

    Raises:
        UsageError: as for `build_library`, or it cannot be loaded.
    """
    library = build_library(extension)
    try:
        return import_library(extension, library)
    except (ImportError, OSError) as error:
        raise UsageError(f"{library} cannot be loaded: {error}. Delete it, and it is compiled anew.") from error
