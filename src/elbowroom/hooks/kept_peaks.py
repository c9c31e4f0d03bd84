"""Keeps the peaks of CUDA's allocator for the program, while meters of rooms reset them for each step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

READERS = ("_cuda_memoryStats", "_accelerator_getDeviceStats")
RESETTERS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")
"""PyTorch's bindings, which take the index of a device. `torch.cuda.max_memory_allocated`, for example, calls one."""


class KeptPeaks:
    """Peaks from before they were reset, which the program's calls return, too, until the program resets them.

    Args:
        bindings: module whose functions the program's calls reach.
    """

    def __init__(self, bindings: Any) -> None:
        self._bytes: dict[int, dict[str, int]] = {}  # by device and statistic
        self._reset: Callable[[int], None] = bindings._cuda_resetPeakMemoryStats
        for name in READERS:
            if (read := getattr(bindings, name, None)) is not None:
                setattr(bindings, name, functools.partial(self._read, read))
        for name in RESETTERS:
            if (reset := getattr(bindings, name, None)) is not None:
                setattr(bindings, name, functools.partial(self._forget, reset))

    def reset(self, device: int, peaks: Mapping[str, int]) -> None:
        """Reset the peaks of a device, unnoticed by the program.

        Args:
            peaks: bytes to keep, by the name of a statistic, such as "allocated_bytes".
        """
        kept = self._bytes.setdefault(device, {})
        for name, nbytes in peaks.items():
            kept[name] = max(nbytes, kept.get(name, 0))
        self._reset(device)

    def _read(self, read: Callable[[int], Any], device: int) -> Any:
        found = read(device)
        for name, nbytes in self._bytes.get(device, {}).items():
            found[name]["all"]["peak"] = max(nbytes, found[name]["all"]["peak"])
        return found

    def _forget(self, reset: Callable[[int], None], device: int) -> None:
        self._bytes.pop(device, None)
        reset(device)


@functools.cache
def keep_peaks() -> KeptPeaks:
    """Return the peaks kept in this process, which are kept from the first call on."""
    return KeptPeaks(torch._C)
