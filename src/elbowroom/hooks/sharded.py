"""Finds out how a model is spread over several devices."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch


def find_sharded(model: torch.nn.Module) -> str:
    """Return a description of the first sharded part of a model, or "". DistributedDataParallel does not count.

    Only looks at modules that are already imported: a sharded model has imported its library, and importing is slow.
    """
    fsdp, tensor = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("torch.distributed.tensor")
    wrappers = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            return f"module {name!r} is sharded by FSDP" if name else "it is sharded by FSDP"
    for name, parameter in model.named_parameters():
        if tensor is not None and isinstance(parameter, tensor.DTensor):
            return f"parameter {name!r} is a DTensor"
    return ""


def find_replicas(model: torch.nn.Module) -> tuple[Any, ...]:
    """Return the `DistributedDataParallel` modules of a model."""
    if "torch.distributed" not in sys.modules:
        return ()
    return tuple(each for each in model.modules() if isinstance(each, torch.nn.parallel.DistributedDataParallel))


def list_bucketed(replicas: Iterable[Any]) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradients are views of buckets of `DistributedDataParallel`.

    A bucket is one storage for several gradients, and DDP accesses its memory without an op.
    """
    viewing = [each for each in replicas if each.gradient_as_bucket_view]
    return [parameter for each in viewing for parameter in each.module.parameters()]
