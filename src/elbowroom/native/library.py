"""The extension in C++: compiled once for each PyTorch and Python, with the package or into the user's cache."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import platform
import shlex
import sys
import sysconfig
from types import ModuleType
from typing import NamedTuple

import torch

from elbowroom import _folders, _toolchain
from elbowroom.errors import UsageError

# As PyTorch itself is compiled: without NDEBUG its headers lay out some objects differently.
FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fvisibility=hidden", "-pthread")

# In a process of its own: what the compiler prints can be quoted, and setuptools, which PyTorch imports here, replaces
# parts of Python.
COMPILE = """
import json, sys
from torch.utils.cpp_extension import load
load(**json.loads(sys.argv[1]))
"""


class Extension(NamedTuple):
    """An extension module.

    Attributes:
        name: of the module.
        what: it is, for messages.
        sources: that are compiled.
        headers: that they include, beside PyTorch's.
    """

    name: str
    what: str
    sources: tuple[pathlib.Path, ...]
    headers: tuple[pathlib.Path, ...]


FOLDER = pathlib.Path(__file__).parent

SOURCES, HEADERS = (tuple(sorted(FOLDER.glob(f"*{suffix}"))) for suffix in (".cpp", ".h"))

NATIVE = Extension("_native", "the extension that counts memory", SOURCES, HEADERS)
"""Used by every room."""


def find_library(extension: Extension, folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return an extension's file, whether it is there or not: one for each source, PyTorch and Python.

    Args:
        folder: where it is kept; by default the package if it was compiled with it, else the user's cache.
    """
    stands_on = (torch.__version__, torch.version.git_version, sys.version, FLAGS, _toolchain.SEAL_BYTES)
    stamp = hashlib.sha256(repr((*stands_on, platform.machine())).encode())
    for source in (*extension.sources, *extension.headers):
        stamp.update(source.name.encode() + source.read_bytes())
    name = f"{extension.name[1:]}-{stamp.hexdigest()[:16]}.so"
    if folder is None:
        folder = FOLDER if _toolchain.is_whole(FOLDER / name) else _folders.find_cache()
    return folder / name


def is_built(extension: Extension, folder: pathlib.Path | None = None) -> bool:
    """Tell whether an extension is compiled already.

    Raises:
        UsageError: somebody else may have written it, so it must not be loaded.
    """
    library = find_library(extension, folder)
    # Who can write into the package can change its Python as well.
    return _toolchain.is_whole(library) if library.parent == FOLDER else _toolchain.is_made(library)


def build_library(extension: Extension, folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return an extension's file. Compile it if it is not there, which takes half a minute and 1.5 GiB.

    Raises:
        UsageError: there is no compiler, it does not compile, or not for this Python; others can write to the folder.
    """
    library = find_library(extension, folder)
    if not is_built(extension, folder):
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise UsageError(f"{extension.what} needs Python's global lock, which this Python is built without")
        compiler = _toolchain.find_compiler(extension.what, _toolchain.CPP)
        with _toolchain.making(extension.what, _toolchain.CPP, library) as made:
            _compile(extension, compiler, made)
            (made / f"{extension.name}.so").rename(made / library.name)
    return library


def _compile(extension: Extension, compiler: list[str], folder: pathlib.Path) -> None:
    """Compile and link in a folder, by PyTorch's own builder of extensions.

    All sources are one file to the compiler: most of its time goes into PyTorch's headers, once for each file.
    """
    import ninja  # needed by nobody whose extension is there

    whole = folder / f"{extension.name}_all.cpp"
    whole.write_text("".join(f'#include "{source.resolve()}"\n' for source in extension.sources))
    wrapper = folder / "compiler"  # PyTorch takes a program, not a command with arguments
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@"\n')
    wrapper.chmod(0o755)
    options = {
        "name": extension.name,
        "sources": [str(whole)],
        "extra_cflags": FLAGS,
        "extra_include_paths": sorted({str(header.parent.resolve()) for header in extension.headers}),
        "build_directory": str(folder),
    }
    environment = {
        **os.environ,
        "CXX": str(wrapper) if len(compiler) > 1 else compiler[0],
        "PATH": os.pathsep.join(filter(None, (ninja.BIN_DIR, os.environ.get("PATH", os.defpath)))),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", COMPILE, json.dumps(options)]
    _toolchain.run_compiler(extension.what, _toolchain.CPP, command, environment)


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
