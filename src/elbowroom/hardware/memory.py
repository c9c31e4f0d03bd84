"""Memory size of a device, budgets, and settings of the CUDA allocator."""

from __future__ import annotations

import logging
import os

import torch

from elbowroom.errors import UsageError
from elbowroom.tiers.host_memory import count_host_bytes
from elbowroom.units import parse_bytes

logger = logging.getLogger(__name__)


def count_device_bytes(device: torch.device) -> int:
    """Return the total memory of a device; of a CPU, what the limits of control groups leave of it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return count_host_bytes()


def parse_budget(memory_budget: int | float | str, device: torch.device | None) -> int:
    """Return a budget in bytes. `device`: None for one that is not known yet, of 1 TiB.

    Args:
        memory_budget: a number of bytes, "8GiB" or "8G" (1024), "8GB" (1000), or "60%" of the device's memory.

    Raises:
        UsageError: the budget is malformed.
    """
    try:
        return parse_bytes(memory_budget, device_bytes=1 << 40 if device is None else count_device_bytes(device))
    except ValueError as error:
        raise UsageError(f"memory_budget: {error}") from error


def cut_blocks_to_size() -> bool:
    """Make the CUDA caching allocator split blocks to the requested size. Returns whether it accepted the setting.

    By default a cached block that is up to 1 MiB too large is not split, and all of it counts as allocated, so the
    memory of a step depends on what was freed before. Blocks of expandable segments are always split (to multiples of
    512 bytes), and their free memory stays contiguous. Settings of the program take precedence.
    """
    if any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        return False
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    try:
        change("expandable_segments:True")
    except (AttributeError, RuntimeError, ValueError) as error:
        logger.info("the allocator does not take expandable_segments: %s", error)
        return False
    return True
