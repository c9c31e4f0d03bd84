"""The library in C, compiled when it is first asked for by the system's own compiler, and kept."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import tempfile

from elbowroom.errors import UsageError

SOURCES = pathlib.Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=c11", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-fexceptions", "-pthread")
LIBRARIES = ("-ldl",)


def find_compiler() -> list[str]:
    """The command of the system's C compiler: what CC says, or the first that is there of cc, gcc and clang.

    Raises:
        UsageError: there is none.
    """
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [[name] for name in COMPILERS]:
        if shutil.which(command[0]):
            return command
    raise UsageError(
        f"the arena is compiled on this machine, and there is no C compiler: {' or '.join(named[:1] or COMPILERS)} was "
        "not found. Install one (apt-get install gcc, say), or name it in the environment variable CC."
    )


def list_sources() -> list[pathlib.Path]:
    """Every file the library is made of."""
    return sorted([*SOURCES.glob("*.c"), *SOURCES.glob("*.h")])


def build_library(folder: pathlib.Path | None = None) -> pathlib.Path:
    """The library's file; compiled if there is none of the same source, compiler and flags.

    Args:
        folder: where it is kept; by default the user's cache.

    Raises:
        UsageError: there is no compiler, or it does not compile.
    """
    compiler = find_compiler()
    stamp = hashlib.sha256(repr((compiler, _tell_version(compiler), FLAGS, platform.machine())).encode())
    for source in list_sources():
        stamp.update(source.name.encode() + source.read_bytes())
    folder = _find_folder() if folder is None else folder
    library = folder / f"arena-{stamp.hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        compile_sources(library, [path for path in list_sources() if path.suffix == ".c"], FLAGS)
    return library


def compile_sources(made: pathlib.Path, sources: list[pathlib.Path], flags: tuple[str, ...]) -> None:
    """Compile and link in one go. The file is there whole or not at all, whoever else is making it.

    Raises:
        UsageError: there is no compiler, or it does not compile.
    """
    number, part = tempfile.mkstemp(dir=made.parent, prefix=made.stem, suffix=".part")
    os.close(number)
    command = [*find_compiler(), *flags, "-o", part, *map(str, sources), *LIBRARIES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise UsageError(
                f"the arena does not compile: {shlex.join(command)} ended with {done.returncode}: "
                f"{done.stderr.strip()[-2000:]}. Name another compiler in the environment variable CC."
            )
        os.replace(part, made)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


def _tell_version(compiler: list[str]) -> str:
    done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


def _find_folder() -> pathlib.Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(cache) if cache else pathlib.Path.home() / ".cache") / "elbowroom"
