"""Ops without effect at the beginning and end of an update (see `ir/updates.py`).

Like all ops they are traced, recognized when a step follows its plan, and preceded by the return of what they use.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LIBRARY = torch.library.Library("elbowroom", "DEF")

for _name in ("begin_update", "end_update"):
    _LIBRARY.define(f"{_name}(Tensor[] tensors) -> ()")  # kernels: in `native/unboxed_ops.cpp`


def begin_update(tensors: Sequence[torch.Tensor]) -> None:
    """Mark the beginning of an update of these tensors, which are brought into memory."""
    torch.ops.elbowroom.begin_update.default(tensors)


def end_update(tensors: Sequence[torch.Tensor]) -> None:
    """Mark its end."""
    torch.ops.elbowroom.end_update.default(tensors)
