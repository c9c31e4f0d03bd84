"""Creates the ledger for a device."""

from __future__ import annotations

import torch

from elbowroom.hooks.cpu_ledger import CpuLedger
from elbowroom.hooks.cuda_ledger import CudaLedger


def make_ledger(device: torch.device) -> CpuLedger | CudaLedger:
    """Return the ledger for a device.

    Raises:
        UsageError: the extension for the CPU can be neither found nor compiled.
    """
    return CudaLedger(device) if device.type == "cuda" else CpuLedger()
