"""Which card a device such as "cuda:0" is.

CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER number the cards of a process, so another process, or `nvidia-smi`, may call
another card by the same number. A card's UUID is the same for all.
"""

from __future__ import annotations

import contextlib

from elbowroom.errors import UsageError
from elbowroom.sharing.transport.address import CARD


def find_card(device: str) -> str:
    """Return the UUID of a CUDA device; "" on a CPU, and where PyTorch finds no CUDA device. "cuda" is the first one.

    Raises:
        UsageError: PyTorch finds CUDA devices, but not this one; or there is no PyTorch to tell.
    """
    if CARD.fullmatch(device):
        return device
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return ""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise UsageError(
            f"which card {device} is, PyTorch tells, and it is not installed here: write the card's UUID instead, as "
            "`nvidia-smi -L` lists it (GPU-...)"
        ) from error
    if not torch.cuda.is_available():
        return ""
    index = index or "0"
    if not index.isdigit() or int(index) >= torch.cuda.device_count():
        raise UsageError(f"there is no device cuda:{index}; there are {torch.cuda.device_count()}, from cuda:0")
    return _read_uuid(int(index))


def name_card(card: str) -> str:
    """Return what this process calls a card: "cuda:N", or its UUID if it cannot use it."""
    try:
        import torch
    except ModuleNotFoundError:
        return card
    with contextlib.suppress(RuntimeError):  # the driver may fail
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            if _read_uuid(index) == card:
                return f"cuda:{index}"
    return card


def _read_uuid(index: int) -> str:
    import torch

    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
