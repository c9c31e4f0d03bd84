"""The library in C, compiled when it is first asked for by the system's own compiler, and kept."""

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
    """The command of the system's C compiler: what CC says, or the first that is there of cc, gcc and clang.

    Raises:
        UsageError: there is none.
    """
    return _toolchain.find_compiler(WHAT, _toolchain.C)


def list_sources() -> list[pathlib.Path]:
    """Every file the library is made of."""
    return sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")])


def build_library(folder: pathlib.Path | None = None) -> pathlib.Path:
    """The library's file; compiled if there is none of the same source, compiler and flags.

    Args:
        folder: where it is kept; by default the user's cache.

    Raises:
        UsageError: there is no compiler, it does not compile, or others can write to the folder.
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
