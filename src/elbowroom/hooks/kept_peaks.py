"""Has the program read the peaks of CUDA's allocator as if rooms did not reset them to measure steps and ops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from elbowroom.native import library

READERS = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
RESETTERS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
"""PyTorch's bindings, which take the index of a device. `torch.cuda.max_memory_allocated`, for example, calls one."""


@functools.cache
def keep_peaks() -> None:
    """Wrap PyTorch's bindings, once in a process."""
    wrap_bindings(torch._C)


def wrap_bindings(bindings: Any) -> None:
    """Have functions of a module return the highest peaks since the program has reset them by another of its functions.

    Args:
        bindings: has functions named in `READERS` and `RESETTERS`, or some of them.
    """
    for names, wrapped in ((READERS, _read), (RESETTERS, _reset)):
        for name in names:
            if (function := getattr(bindings, name, None)) is not None:
                setattr(bindings, name, functools.partial(wrapped, function))


def _read(read: Callable[[int], Any], index: int) -> Any:
    found = read(index)
    peaks = library.load().find_program_peaks(f"cuda:{index}")
    for name, nbytes in zip(("allocated_bytes", "reserved_bytes"), peaks, strict=True):
        counts = found[name]["all"]
        counts["peak"] = max(nbytes, counts["peak"])
    return found


def _reset(reset: Callable[[int], None], index: int) -> None:
    native, device = library.load(), f"cuda:{index}"
    native.reset_peaks(device)  # the running step keeps its peak
    native.forget_program_peaks(device)
    reset(index)
