"""Finds out how a model is spread over several devices."""

from __future__ import annotations

import sys
from typing import Any

import torch

from elbowroom.hooks.unsharded_weights import list_fsdp_parameters


def find_sharded(model: torch.nn.Module) -> str:
    """Return why a model is sharded in a way that rooms do not manage, or "".

    They manage `DistributedDataParallel`, and `fully_shard` without subclasses of its own. Only looks at modules that
    are already imported: a sharded model has imported its library, and importing is slow.
    """
    fsdp, tensor = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("torch.distributed.tensor")
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            return f"{_name(name)} is sharded by FullyShardedDataParallel; use fully_shard"
    managed = set()
    for each in list_fsdp_parameters(model):
        managed.add(id(each.sharded_param))
        if each.is_dtensor:
            return f"parameter {each._param_fqn!r} is a DTensor besides being sharded by fully_shard"
        if each.offload_to_cpu:
            return "fully_shard has an offload policy, which room.step() takes the place of"
        if hasattr(each._sharded_local_tensor, "fsdp_post_all_gather"):
            return f"parameter {each._param_fqn!r} is of a class that gathers by functions of its own"
    for name, parameter in model.named_parameters():
        if tensor is not None and isinstance(parameter, tensor.DTensor) and id(parameter) not in managed:
            return f"parameter {name!r} is a DTensor"
    return ""


def list_shard_ranks(model: torch.nn.Module) -> set[int]:
    """Return the ranks, in the default group, over which `fully_shard` has spread a model; empty without it."""
    return {
        rank for each in list_fsdp_parameters(model) for rank in each.sharded_param.device_mesh.mesh.flatten().tolist()
    }


def is_sharded(model: torch.nn.Module) -> bool:
    """Tell whether `fully_shard` has spread a model."""
    return next(list_fsdp_parameters(model), None) is not None


def _name(module: str) -> str:
    return f"module {module!r}" if module else "it"


def find_replicas(model: torch.nn.Module) -> tuple[Any, ...]:
    """Return the `DistributedDataParallel` modules of a model."""
    if "torch.distributed" not in sys.modules:
        return ()
    return tuple(each for each in model.modules() if isinstance(each, torch.nn.parallel.DistributedDataParallel))


def list_bucketed(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradients are views of one storage.

    Buckets of `DistributedDataParallel`, whose memory it accesses without an op, and what `fully_shard` receives.
    """
    viewing = [each for each in find_replicas(model) if each.gradient_as_bucket_view]
    bucketed = [parameter for each in viewing for parameter in each.module.parameters()]
    return bucketed + [each.sharded_param for each in list_fsdp_parameters(model)]
