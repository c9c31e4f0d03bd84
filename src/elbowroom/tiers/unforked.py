"""Memory that forked processes do not get.

Linux copies all pinned pages at a fork, since a device may write to them: each worker of a DataLoader would have the
slabs once more.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

_held: dict[int, torch.Tensor] = {}
"""By address. In a forked process they are never freed: something else may lie at their addresses there."""


def hold_back(memory: torch.Tensor) -> None:
    """Leave memory out of processes that are forked from now on, until `give_back`. Best effort.

    Args:
        memory: contiguous bytes that begin with a page and share none with anything else.
    """
    _held[memory.data_ptr()] = memory
    _advise(memory, mmap.MADV_DONTFORK)


def give_back(memory: torch.Tensor) -> None:
    """Undo `hold_back`. Nothing happens in a process that was forked in between."""
    if memory.data_ptr() in _held:
        _advise(memory, mmap.MADV_DOFORK)
        del _held[memory.data_ptr()]


def _advise(memory: torch.Tensor, advice: int) -> None:
    nbytes = -(-memory.numel() // mmap.PAGESIZE) * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(nbytes), advice)


def _never_free() -> None:
    for memory in _held.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    _held.clear()


os.register_at_fork(after_in_child=_never_free)
