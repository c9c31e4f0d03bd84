"""The processor's instruction set, which decides what kernels allocate."""

from __future__ import annotations

import torch


def find_isa() -> str:
    """Return the widest instruction set that convolutions use here, as in `HardwareProfile`."""
    if torch.cpu._is_avx512_supported():
        return "AVX512"
    return "AVX2" if torch.cpu._is_avx2_supported() else ""
