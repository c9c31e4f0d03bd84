"""Limits of the system on this process's memory, and what is left within them."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

import torch


def read_data_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData:"))


def fill_memory(nbytes: int) -> list[torch.Tensor]:
    """Take memory in pieces of so many bytes until there is no more."""
    held = []
    with contextlib.suppress(RuntimeError, MemoryError):
        while True:
            held.append(torch.empty(nbytes, dtype=torch.uint8))
    return held


@contextlib.contextmanager
def limited_data(nbytes: int) -> Iterator[None]:
    """Return a context in which the process may have so many bytes of data beyond what it has."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (read_data_bytes() + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
