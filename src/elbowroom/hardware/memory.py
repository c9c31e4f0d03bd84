"""How much memory a device has, and how the C library keeps what is freed."""

from __future__ import annotations

import ctypes
import logging

import psutil
import torch

logger = logging.getLogger(__name__)

# malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -2, -3, -4
_LARGE_BLOCK_BYTES = 1 << 20
_KEPT_BYTES = (1 << 31) - (1 << 20)


def count_device_bytes(device: torch.device) -> int:
    """All the memory of a device, used or not."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return int(psutil.virtual_memory().total)


def tune_allocator(*, release_pages: bool) -> bool:
    """Tell glibc what to do with freed memory from now on. Returns whether it listened.

    By default it maps large blocks one by one and gives each back when it is freed, with a threshold that moves with
    the program. Every block then costs a page fault per 4 KiB when it is next used.

    Args:
        release_pages: give every large block back at once, so that resident memory follows the live bytes closely;
            otherwise keep freed memory for the next allocation, which saves those page faults.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False  # another C library
    if release_pages:
        return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES))
    kept = mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    return bool(kept and mallopt(_M_TOP_PAD, 64 << 20))
