"""Creates the transfers for a device."""

from __future__ import annotations

import torch

from elbowroom.runtime.transfers import ThreadTransfers, Transfers
from elbowroom.tiers.disk import SpillFile


def open_transfers(device: torch.device, spill_folder: str | None, host_bytes: int | None) -> Transfers:
    """Open the tiers below `device` and return the transfers to and from them.

    Raises:
        UsageError: the spill folder is missing or not writable.
    """
    if device.type == "cuda":
        from elbowroom.hardware.host_memory import count_free_bytes
        from elbowroom.runtime.stream_transfers import StreamTransfers
        from elbowroom.runtime.streams import CudaStreams
        from elbowroom.tiers.pinned import CudaPinning, HostSlabs

        # Pinned memory cannot be swapped: leave half of the free memory to the rest of the program.
        capacity = host_bytes if host_bytes is not None else count_free_bytes() // 2
        host = HostSlabs(capacity, pinning=CudaPinning(device))
        return StreamTransfers(CudaStreams(device), host, SpillFile(spill_folder))
    return ThreadTransfers(SpillFile(spill_folder, host_bytes))
