"""Has storages that Python makes without a tensor allocated as tensors are, so that a room counts them.

`torch.UntypedStorage(nbytes)`, and with it `copy.deepcopy` of a tensor or a `state_dict`, takes memory on a CPU from
PyTorch's default allocator, and passes by the one that is registered in its place (`torch/csrc/Storage.cpp`).
"""

from __future__ import annotations

from typing import Any

import torch

from elbowroom.hooks.dispatch_keys import Hidden

LARGEST_BYTES = (1 << 63) - 1

_make = torch._C.StorageBase.__new__


def count_new_storages() -> None:
    """Replace the constructor of `torch.UntypedStorage`. Permanent."""
    if "__new__" not in vars(torch.UntypedStorage):
        torch.UntypedStorage.__new__ = staticmethod(_make_counted)  # type: ignore[assignment]


def _make_counted(kind: type[torch.UntypedStorage], *args: Any, **options: Any) -> torch.UntypedStorage:
    is_size = len(args) == 1 and type(args[0]) is int and 0 < args[0] <= LARGEST_BYTES
    if kind is torch.UntypedStorage and is_size and _is_on_cpu(options):
        with torch._C.DisableTorchFunction(), Hidden():
            made = torch.ops.aten.empty.memory_format(args, dtype=torch.uint8, device="cpu")
            storage: torch.UntypedStorage = made.untyped_storage()
        return storage
    made_by_default: torch.UntypedStorage = _make(kind, *args, **options)
    return made_by_default


def _is_on_cpu(options: dict[str, Any]) -> bool:
    if not options.keys() <= {"device"}:
        return False
    device = options.get("device")
    return device is None or (isinstance(device, str | torch.device) and torch.device(device).type == "cpu")
