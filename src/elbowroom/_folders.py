"""Folders of this machine: for what was compiled on it, and for temporary files.

What is loaded as machine code from a folder can do all that this process can, so it counts who may write there.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterator

from elbowroom.errors import UsageError

ADVICE = "XDG_CACHE_HOME names another folder."


def find_cache() -> pathlib.Path:
    """Where what was compiled is kept: the user's cache; where none can be written to, a folder for temporary files.

    A user without a home (no HOME, and no entry in the system's list of users) is one who cannot have a cache.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(named) / "elbowroom"
    with contextlib.suppress(RuntimeError):  # there is no home
        folder = pathlib.Path.home() / ".cache" / "elbowroom"
        if _can_make(folder):
            return folder
    with contextlib.suppress(UsageError):
        return pathlib.Path(find_temporary()) / f"elbowroom-{os.geteuid()}"
    return pathlib.Path(os.sep, "tmp", f"elbowroom-{os.geteuid()}")


def _can_make(folder: pathlib.Path) -> bool:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


def make_cache(folder: pathlib.Path) -> None:
    """Make a folder for what was compiled, if it is not there.

    Raises:
        UsageError: it cannot be made, or others can write to it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror or error}. {ADVICE}") from error
    check_private(folder)


def check_private(path: pathlib.Path) -> None:
    """Make sure that nobody but this user, or the system's, can have written what is at a path.

    Raises:
        UsageError: somebody else owns it, or may write to it; or it is not there.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    if found.st_uid not in (os.geteuid(), 0):
        raise UsageError(f"{path} belongs to user {found.st_uid}, not to user {os.geteuid()}. {ADVICE}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"others can write to {path} (mode {stat.S_IMODE(found.st_mode):o}), so what is there may not be ours: "
            f"delete it, or look at it and then take that right away (chmod -R go-w). {ADVICE}"
        )


def find_temporary() -> str:
    """The system's folder for temporary files.

    Raises:
        UsageError: there is none that can be written to.
    """
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise UsageError(
            f"there is no folder for temporary files ({error.strerror or error}): name one in the environment variable "
            "TMPDIR, or a folder for the spill file in spill_folder"
        ) from error


@contextlib.contextmanager
def hold_temporary(prefix: str) -> Iterator[pathlib.Path]:
    """A new folder for temporary files, which is deleted at the end.

    Raises:
        UsageError: none can be made.
    """
    where = find_temporary()
    try:
        made = tempfile.TemporaryDirectory(prefix=prefix, dir=where)
    except OSError as error:
        raise UsageError(
            f"cannot write into {where}, the folder for temporary files: {error.strerror or error}. The environment "
            "variable TMPDIR names another."
        ) from error
    with made as folder:
        yield pathlib.Path(folder)
