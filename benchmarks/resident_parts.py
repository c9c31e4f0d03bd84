"""What the resident memory of a process consists of, by the kind of its mappings (/proc/PID/smaps)."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from collections import Counter
from collections.abc import Iterable, Iterator

ARENA = range(0x2000_0000_0000, 0x5000_0000_0000)
"""Addresses of the arena of tensors (`native/pages.cpp`): the middle, where the kernel places nothing by itself."""

STACK_BYTES = (8 << 20, (8 << 20) + 4096)


def read_parts(pid: int) -> Counter[str]:
    """Return the resident bytes that are no files.

    Returns:
        arena: blocks of tensors, live or kept. heap: small blocks of malloc. anonymous: objects of Python, arrays of
        NumPy. stacks. libraries: data of libraries, written to. code: compiled at run time.
    """
    found: Counter[str] = Counter()
    kind, before = "", (0, 0, "")
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "Anonymous:":
            found[kind] += int(rest[0]) << 10
        elif not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            name = rest[4] if len(rest) > 4 else ""
            kind = _name_kind(begin, end, rest[0], name, before)
            before = (begin, end, rest[0])
    return found


def _name_kind(begin: int, end: int, access: str, name: str, before: tuple[int, int, str]) -> str:
    if name.startswith("[stack") or (before[1:] == (begin, "---p") and end - begin in STACK_BYTES):
        return "stacks"
    if name and not name.startswith("["):
        return "libraries"
    if begin in ARENA:
        return "arena"
    if "x" in access:
        return "code"
    return "heap" if name == "[heap]" else "anonymous"


@contextlib.contextmanager
def stopped(pids: Iterable[int]) -> Iterator[None]:
    """Return a context in which processes stand still."""
    pids = list(pids)
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
