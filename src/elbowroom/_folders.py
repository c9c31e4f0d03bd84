"""Folders for compiled files, for temporary files and for results.

Compiled files are loaded into this process, so no other user may be able to write to their folder.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterable, Iterator

from elbowroom.errors import UsageError

ADVICE = "Set XDG_CACHE_HOME to use another folder."


def find_cache() -> pathlib.Path:
    """Return the folder of compiled files: in the user's cache, or in the temporary folder if that is not writable.

    A user may have no home (no HOME, and no entry in the system's list of users).
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(named) / "elbowroom"
    with contextlib.suppress(RuntimeError):  # no home
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
    """Create a folder for compiled files if it does not exist.

    Raises:
        UsageError: it cannot be created, or other users can write to it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"{folder} cannot be created: {error.strerror or error}. {ADVICE}") from error
    check_private(folder)


def check_private(path: pathlib.Path) -> None:
    """Check that only this user or root can write to a path.

    Raises:
        UsageError: another user owns it or may write to it, or it does not exist.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    if found.st_uid not in (os.geteuid(), 0):
        raise UsageError(f"{path} belongs to user {found.st_uid}, not to user {os.geteuid()}. {ADVICE}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"others can write to {path} (mode {stat.S_IMODE(found.st_mode):o}), so its contents cannot be trusted: "
            f"delete it, or inspect it and remove that permission (chmod -R go-w). {ADVICE}"
        )


def find_temporary() -> str:
    """Return the system's folder for temporary files.

    Raises:
        UsageError: no such folder is writable.
    """
    try:
        return tempfile.gettempdir()
    except OSError as error:
        raise UsageError(
            f"there is no folder for temporary files ({error.strerror or error}): set the environment variable TMPDIR "
            "to one, or pass spill_folder= for the spill file"
        ) from error


@contextlib.contextmanager
def hold_temporary(prefix: str) -> Iterator[pathlib.Path]:
    """Yield a new folder for temporary files, and delete it at the end.

    Raises:
        UsageError: it cannot be created.
    """
    where = find_temporary()
    try:
        made = tempfile.TemporaryDirectory(prefix=prefix, dir=where)
    except OSError as error:
        raise UsageError(
            f"cannot write to {where}, the folder for temporary files: {error.strerror or error}. Set the environment "
            "variable TMPDIR to use another."
        ) from error
    with made as folder:
        yield pathlib.Path(folder)


def check_regular(path: pathlib.Path) -> None:
    """Check that a path is a regular file, or none yet.

    Raises:
        UsageError: it is a folder or a device, for example, or such a path cannot be.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL
        raise UsageError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(mode):
        raise UsageError(f"cannot write {path}: it is {'a folder' if stat.S_ISDIR(mode) else 'not a regular file'}")


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Return a context with the path of a new file, which takes the place of `path` once it is complete.

    Raises:
        UsageError: it cannot be written. `path` is as before.
    """
    path = pathlib.Path(path)
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def check_writable(*paths: pathlib.Path | None, inputs: Iterable[str | os.PathLike[str] | None] = ()) -> None:
    """Check early that results can be written, leaving nothing behind.

    Args:
        inputs: what the command reads, as far as that is files.

    Raises:
        UsageError: a folder does not exist or is not writable, a path is not a regular file, is given twice, or is an
            input.
    """
    given = [path for path in paths if path is not None]
    read = [pathlib.Path(each).resolve() for each in inputs if each is not None]
    for index, path in enumerate(given):
        check_regular(path)
        if not path.parent.is_dir():
            raise UsageError(f"cannot write {path}: {path.parent} is not a folder")
        if path.resolve() in [other.resolve() for other in given[:index]]:
            raise UsageError(f"cannot write {path}: it is given for two results")
        if path.resolve() in read:
            raise UsageError(f"cannot write {path}: it is one of the files that are read")
        try:
            # Permission bits do not tell (root, read-only file systems), so create a file.
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror or error}") from error
        os.close(handle)
        os.unlink(temporary)
