"""Creates the transfers for a device."""

from __future__ import annotations

import logging

import torch

from elbowroom.cost.transfers import count_least_host_bytes
from elbowroom.runtime.transfers import ThreadTransfers, Transfers
from elbowroom.tiers.disk import SpillFile
from elbowroom.units import format_bytes

logger = logging.getLogger(__name__)


def open_transfers(device: torch.device, spill_folder: str | None, host_bytes: int | None) -> Transfers:
    """Open the tiers below `device` and return the transfers to and from them.

    Raises:
        UsageError: the spill folder is missing or not writable.
    """
    if device.type == "cuda":
        from elbowroom.runtime.stream_transfers import StreamTransfers
        from elbowroom.runtime.streams import CudaStreams
        from elbowroom.tiers.host_memory import count_free_bytes
        from elbowroom.tiers.pinned import CudaPinning, HostSlabs

        # Pinned memory cannot be swapped: leave half of the free memory to the rest of the program.
        capacity = host_bytes if host_bytes is not None else count_free_bytes() // 2
        host = HostSlabs(capacity, pinning=CudaPinning(device))
        return StreamTransfers(CudaStreams(device), host, open_spill_behind(capacity, spill_folder))
    return ThreadTransfers(SpillFile(spill_folder, host_bytes))


def open_spill_behind(host_bytes: int, spill_folder: str | None) -> SpillFile | None:
    """Open the spill file behind host memory; None, with a warning, if that is too small to stage copies to it.

    Raises:
        UsageError: the spill folder is missing or not writable.
    """
    if host_bytes >= count_least_host_bytes():
        return SpillFile(spill_folder)
    logger.warning(
        "nothing goes on to the disk, as copies to it pass through %s of host memory, and host_bytes=%d allows less",
        format_bytes(count_least_host_bytes()), host_bytes,
    )  # fmt: skip
    return None
