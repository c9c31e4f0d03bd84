"""The system's own compilers, for what is compiled on the user's machine, once, and kept."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from elbowroom._folders import ADVICE, check_private, make_cache
from elbowroom.errors import UsageError
from elbowroom.progress import announcing


class Language(NamedTuple):
    """What a compiler compiles.

    Attributes:
        name: of the language.
        variable: of the environment, which may name a compiler.
        commands: that are looked for otherwise.
    """

    name: str
    variable: str
    commands: tuple[str, ...]


SEAL_BYTES = 32
"""At the end of each compiled file: the SHA-256 of what comes before. Whoever loads such a file does not look there."""

C = Language("C", "CC", ("cc", "gcc", "clang"))
CPP = Language("C++", "CXX", ("c++", "g++", "clang++"))


def find_compiler(what: str, language: Language) -> list[str]:
    """The command of a compiler: what the environment says, or the first that is there.

    Args:
        what: is compiled, for the message.

    Raises:
        UsageError: there is none.
    """
    named = shlex.split(os.environ.get(language.variable, ""))
    for command in [named] if named else [[name] for name in language.commands]:
        if shutil.which(command[0]):
            return command
    raise UsageError(
        f"{what} is compiled on this machine, and there is no {language.name} compiler: "
        f"{' or '.join(named[:1] or language.commands)} was not found. Install one (apt-get install "
        f"{language.commands[1]}, say), or name it in the environment variable {language.variable}."
    )


def compile_sources(
    what: str, language: Language, made: pathlib.Path, sources: Sequence[pathlib.Path], flags: Sequence[str],
    libraries: Sequence[str],
) -> None:  # fmt: skip
    """Compile, on all cores, and link. The file is there whole or not at all, whoever else is making it.

    Raises:
        UsageError: there is no compiler, it does not compile, or nothing can be written there.
    """
    compiler = find_compiler(what, language)
    try:
        make_cache(made.parent)
    except UsageError as error:
        raise UsageError(f"{what} cannot be compiled into {made.parent}: {error}") from error
    try:
        number, part = tempfile.mkstemp(dir=made.parent, prefix=made.stem, suffix=".part")
    except OSError as error:
        raise UsageError(f"{what} cannot be compiled into {made.parent}: {error.strerror}. {ADVICE}") from error
    os.close(number)
    try:
        note = announcing(f"compiling {what}", f"{language.name}, kept for the next time")
        with note, tempfile.TemporaryDirectory(prefix="elbowroom-") as folder:
            objects = [str(pathlib.Path(folder) / f"{source.name}.o") for source in sources]
            pairs = zip(objects, map(str, sources), strict=True)
            commands = [[*compiler, *flags, "-c", "-o", each, source] for each, source in pairs]
            with ThreadPoolExecutor(max_workers=min(len(sources), os.cpu_count() or 1)) as pool:
                list(pool.map(lambda command: _run(what, language, command), commands))
            _run(what, language, [*compiler, *flags, "-o", part, *objects, *libraries])
        with open(part, "r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(_digest(pathlib.Path(part).read_bytes()))
        os.replace(part, made)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)


def _run(what: str, language: Language, command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(
            f"{what} does not compile: {shlex.join(command)} ended with {done.returncode}: "
            f"{done.stderr.strip()[-2000:]}. Name another compiler in the environment variable {language.variable}."
        )


def is_made(made: pathlib.Path) -> bool:
    """Whether a compiled file is there, as it was made: its last bytes are the digest of the others.

    Raises:
        UsageError: somebody else may have written it, so it must not be loaded.
    """
    if not made.exists():
        return False
    check_private(made.parent)
    check_private(made)
    contents = made.read_bytes()
    return contents[-SEAL_BYTES:] == _digest(contents[:-SEAL_BYTES])


def _digest(contents: bytes) -> bytes:
    return hashlib.sha256(contents).digest()
