"""Which recorded ops may be replayed: the rules for ops, asked of the observer's records."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch._ops import OpOverload

from elbowroom.hooks.replayable import STATISTICS, find_barrier


def find_operator(name: str) -> OpOverload:
    """Return the operator of a name such as "aten.add.Tensor".

    Raises:
        AttributeError: there is none, or there is none any more.
    """
    namespace, packet, overload = name.rsplit(".", 2)
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    assert isinstance(found, OpOverload)
    return found


def find_recorded_barrier(op: Any) -> str:
    """Return why a recorded op must not be replayed; "" if it may be.

    Args:
        op: a `RecordedOp` of the observer.
    """
    return str(op.obstacle) or find_barrier(find_operator(op.name), op.arguments, {})


def tell_statistics(native: ModuleType) -> None:
    """Tell the extension which statistics ops update although their schemas do not say so."""
    native.set_statistics(STATISTICS)
