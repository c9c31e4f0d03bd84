"""Compile the C library with the system's compiler on first use, and cache it."""

from __future__ import annotations

import hashlib
import pathlib
import platform
import subprocess

from elbowroom import _folders, _toolchain

SOURCES = pathlib.Path(__file__).parent
FLAGS = ("-std=c11", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-fexceptions", "-pthread")
LIBRARIES = ("-ldl",)
WHAT = "the arena"


def find_compiler() -> list[str]:
    """Return the command of the C compiler: CC if set, else the first installed of cc, gcc and clang.

    Raises:
        UsageError: no compiler is installed.
    """
    return _toolchain.find_compiler(WHAT, _toolchain.C)


def list_sources() -> list[pathlib.Path]:
    """Return the sources and headers of the library."""
    return sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")])


def build_library(folder: pathlib.Path | None = None) -> pathlib.Path:
    """Return the path of the library; compile it unless one of the same source, compiler and flags is cached.

    Args:
        folder: the cache; by default the user's.

    Raises:
        UsageError: no compiler is installed, compilation fails, or other users can write to the folder.
    """
    compiler = find_compiler()
    stamp = hashlib.sha256(
        repr((compiler, _tell_version(compiler), FLAGS, _toolchain.SEAL_BYTES, platform.machine())).encode()
    )
    for source in list_sources():
        stamp.update(source.name.encode() + source.read_bytes())
    library = (_folders.find_cache() if folder is None else folder) / f"arena-{stamp.hexdigest()[:16]}.so"
    if not _toolchain.is_made(library):
        sources = [str(path) for path in list_sources() if path.suffix == ".c"]
        with _toolchain.making(WHAT, _toolchain.C, library) as made:
            command = [*compiler, *FLAGS, "-o", str(made / library.name), *sources, *LIBRARIES]
            _toolchain.run_compiler(WHAT, _toolchain.C, command)
    return library


def _tell_version(compiler: list[str]) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]
