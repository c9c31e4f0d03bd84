"""Memory of the host, within the limits of the control groups (containers, slices, batch jobs) of this process."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import psutil

MOUNT = pathlib.Path("/sys/fs/cgroup")
OWN_GROUPS = pathlib.Path("/proc/self/cgroup")

V2_FILES = ("memory.max", "memory.current", ("inactive_file", "active_file"))
V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
"""Names of the limit, of what is used, and of the lines of `memory.stat` that say how much of it is page cache."""


def count_host_bytes() -> int:
    """Return the memory of the machine, or the lowest limit of a control group if that is less."""
    return min(int(psutil.virtual_memory().total), *(limit for limit, _ in _list_limits()))


def count_free_bytes() -> int:
    """Return the memory that this process can still take: what is free in the machine and in each control group.

    The page cache counts as free, since the system gives it up.
    """
    return min(int(psutil.virtual_memory().available), *(max(0, limit - used) for limit, used in _list_limits()))


def _list_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and the used bytes of each control group that has a limit, and one that never applies."""
    yield 1 << 62, 0
    for folder, (limit, used, cache) in _list_groups():
        limit_bytes = _read_number(folder / limit)
        if limit_bytes is not None:
            yield limit_bytes, (_read_number(folder / used) or 0) - _count_cache(folder, cache)


def _list_groups() -> Iterator[tuple[pathlib.Path, tuple[str, str, tuple[str, ...]]]]:
    """Yield the folders of the groups of this process with those above them, and the names of the files there.

    In a container a group's path may be that outside of it, and the container's own group is where it is mounted.
    """
    yield MOUNT, V2_FILES
    yield MOUNT / "memory", V1_FILES
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in OWN_GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                mount, files = MOUNT, V2_FILES
            elif "memory" in controllers.split(","):
                mount, files = MOUNT / "memory", V1_FILES
            else:
                continue
            folder = mount / path.lstrip("/")
            while folder != mount and ".." not in folder.parts:
                yield folder, files
                folder = folder.parent


def _read_number(file: pathlib.Path) -> int | None:
    """Return the number in a file; None if there is none, as "max" stands for no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _count_cache(folder: pathlib.Path, names: tuple[str, ...]) -> int:
    """Return the bytes of a group's page cache; 0 if they are not known."""
    with contextlib.suppress(OSError, ValueError):
        figures = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        return sum(int(figures.get(name, 0)) for name in names)
    return 0
