"""Finds the optimizers of PyTorch inside those of frameworks."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from elbowroom.api import list_optimizers


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer inside the wrappers of a framework, which keep it in their attribute `optimizer`.

    Raises:
        UsageError: it is no optimizer of PyTorch.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return list_optimizers(optimizer)[0]
