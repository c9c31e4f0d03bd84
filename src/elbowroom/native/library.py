"""Builds and loads the C++ extension: once per PyTorch and Python, with the package or into the user's cache."""

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
import threading
from types import ModuleType
from typing import NamedTuple

import torch

from elbowroom import _folders, _toolchain
from elbowroom.errors import UsageError

# PyTorch itself is compiled with NDEBUG; without it, its headers define some objects with another layout.
FLAGS = ("-std=c++20", "-O2", "-DNDEBUG", "-fvisibility=hidden", "-pthread")

# Runs in a separate process, so that the compiler's output can be quoted, and because setuptools, which PyTorch imports
# here, patches parts of Python.
COMPILE = """
import json, sys
from torch.utils.cpp_extension import load
load(**json.loads(sys.argv[1]))
"""


class Extension(NamedTuple):
    """An extension module.

    Attributes:
        name: name of the module.
        what: description for messages.
        sources: source files.
        headers: headers that the sources include, other than PyTorch's.
    """

    name: str
    what: str
    sources: tuple[pathlib.Path, ...]
    headers: tuple[pathlib.Path, ...]


FOLDER = pathlib.Path(__file__).parent

TORCH_VERSIONS = ((2, 11), (2, 15))
"""Oldest and newest version of PyTorch: the extra `torch` of pyproject.toml says the same to pip."""

SOURCES, HEADERS = (tuple(sorted(FOLDER.glob(f"*{suffix}"))) for suffix in (".cpp", ".h"))

NATIVE = Extension("_native", "the extension that counts memory", SOURCES, HEADERS)
"""The extension that every room uses."""


def find_library(extension: Extension, folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return the path of an extension's file, which may not exist yet, for these sources, PyTorch and Python.

    Args:
        folder: folder of the file; by default the package if the file was compiled with it, else the user's cache.
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
        UsageError: another user may have written the file, so it must not be loaded.
    """
    library = find_library(extension, folder)
    # No check in the package: anyone who can write to it can also change its Python code.
    return _toolchain.is_whole(library) if library.parent == FOLDER else _toolchain.is_made(library)


def build_library(extension: Extension, folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return an extension's file, compiling it if needed, which takes one to two minutes and 2.2 GiB.

    Raises:
        UsageError: no compiler was found, compilation fails, this PyTorch or Python is not supported, or other users
            can write to the folder.
    """
    check_torch(torch.__version__)
    library = find_library(extension, folder)
    if not is_built(extension, folder):
        if sysconfig.get_config_var("Py_GIL_DISABLED"):
            raise UsageError(f"{extension.what} needs the GIL, but this is a free-threaded build of Python")
        compiler = _toolchain.find_compiler(extension.what, _toolchain.CPP)
        with _toolchain.making(extension.what, _toolchain.CPP, library) as made:
            _compile(extension, compiler, made)
            (made / f"{extension.name}.so").rename(made / library.name)
    return library


def check_torch(version: str) -> None:
    """Check that Elbowroom knows this PyTorch. pip does not, as PyTorch is not among the package's dependencies.

    Raises:
        UsageError: it is older or newer.
    """
    oldest, newest = TORCH_VERSIONS
    if not oldest <= tuple(int(part) for part in version.split(".")[:2]) <= newest:
        raise UsageError(
            f"Elbowroom works with PyTorch {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}, and this is {version}; "
            "run: pip install 'elbowroom[torch]'"
        )


def _compile(extension: Extension, compiler: list[str], folder: pathlib.Path) -> None:
    """Compile and link in a folder with PyTorch's `cpp_extension`.

    All sources are compiled as one file, since most of the time goes into parsing PyTorch's headers.
    """
    import ninja  # only needed for compiling

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
        ImportError, OSError: the file cannot be loaded.
    """
    spec = importlib.util.spec_from_file_location(extension.name, library)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


_loading = threading.Lock()


@functools.cache
def load(extension: Extension = NATIVE) -> ModuleType:
    """Return an extension, compiling it if needed.

    Raises:
        UsageError: as for `build_library`, or the file cannot be loaded.
    """
    with _loading:  # `functools.cache` lets two threads in, and each would initialize the module
        return _load(extension)


@functools.cache
def _load(extension: Extension) -> ModuleType:
    library = build_library(extension)
    try:
        return import_library(extension, library)
    except (ImportError, OSError) as error:
        raise UsageError(f"{library} cannot be loaded: {error}. Delete it to compile it again.") from error
