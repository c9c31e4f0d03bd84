"""Compiles libraries with the system's compilers, once, and keeps them on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from elbowroom._folders import ADVICE, check_private, make_cache
from elbowroom.errors import UsageError
from elbowroom.progress import announcing


class Language(NamedTuple):
    """Programming language and its compilers.

    Attributes:
        name: name of the language.
        variable: environment variable that may name a compiler.
        commands: compilers to look for otherwise.
    """

    name: str
    variable: str
    commands: tuple[str, ...]


SEAL_BYTES = 32
"""Length of the SHA-256 digest appended to each compiled file. The dynamic loader ignores it."""

QUOTED_LINES = 12
"""Lines of a compiler's output that an error message quotes."""

C = Language("C", "CC", ("cc", "gcc", "clang"))
CPP = Language("C++", "CXX", ("c++", "g++", "clang++"))


def find_compiler(what: str, language: Language) -> list[str]:
    """Return the command of the compiler named in the environment, else of the first one installed.

    Args:
        what: what is compiled, for the message.

    Raises:
        UsageError: no compiler was found.
    """
    named = shlex.split(os.environ.get(language.variable, ""))
    for command in [named] if named else [[name] for name in language.commands]:
        if shutil.which(command[0]):
            return command
    raise UsageError(
        f"{what} must be compiled on this machine, but there is no {language.name} compiler: "
        f"{' or '.join(named[:1] or language.commands)} was not found. Install one (for example, apt-get install "
        f"{language.commands[1]}), or name it in the environment variable {language.variable}."
    )


@contextlib.contextmanager
def making(what: str, language: Language, made: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a temporary folder in which the caller makes the file; then seal the file and move it to `made`.

    The move is atomic, so several processes may make the file at once.

    Raises:
        UsageError: the folder is not writable, or other users can write to it.
    """
    try:
        make_cache(made.parent)
        lent = tempfile.TemporaryDirectory(dir=made.parent, prefix=f"{made.stem}-")
    except UsageError as error:
        raise UsageError(f"{what} cannot be compiled into {made.parent}: {error}") from error
    except OSError as error:
        raise UsageError(f"{what} cannot be compiled into {made.parent}: {error.strerror}. {ADVICE}") from error
    with lent as folder, announcing(f"compiling {what}", f"{language.name}, kept for the next time"):
        yield pathlib.Path(folder)
        part = pathlib.Path(folder, made.name)
        contents = part.read_bytes()
        part.write_bytes(contents + _digest(contents))
        part.chmod(0o755)
        os.replace(part, made)


def run_compiler(
    what: str, language: Language, command: Sequence[str], environment: Mapping[str, str] | None = None
) -> None:
    """Run a compiler, or a program that runs one.

    Raises:
        UsageError: it fails; the message quotes its first error.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, errors="replace")
    except OSError as error:
        raise UsageError(f"{what} cannot be compiled: {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        raise UsageError(
            f"{what} cannot be compiled: {command[0]} exited with {done.returncode}: "
            f"{_quote_error(done.stdout + done.stderr)}\nName another compiler in the environment variable "
            f"{language.variable}."
        )


def _quote_error(output: str) -> str:
    """Return the lines from the first error on; without a line marked as an error, the last lines."""
    lines = [line for line in output.strip().splitlines() if not line.startswith("ninja: ")]
    errors = [index for index, line in enumerate(lines) if re.search(r"\berror: ", line)]
    return "\n".join(lines[errors[0] :][:QUOTED_LINES] if errors else lines[-QUOTED_LINES:])


def is_made(made: pathlib.Path) -> bool:
    """Tell whether a compiled file exists and is complete.

    Raises:
        UsageError: another user may have written it, so it must not be loaded.
    """
    if not made.exists():
        return False
    check_private(made.parent)
    check_private(made)
    return is_whole(made)


def is_whole(made: pathlib.Path) -> bool:
    """Tell whether a compiled file is complete: its last bytes are the digest of the others."""
    try:
        contents = made.read_bytes()
    except OSError:
        return False
    return contents[-SEAL_BYTES:] == _digest(contents[:-SEAL_BYTES])


def _digest(contents: bytes) -> bytes:
    return hashlib.sha256(contents).digest()
