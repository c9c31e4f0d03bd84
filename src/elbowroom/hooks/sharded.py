"""Finds out how a model is spread over several devices."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from elbowroom.hooks.unsharded_weights import list_fsdp_parameters


def find_sharded(model: torch.nn.Module) -> str:
    """Return why a model is sharded in a way that rooms do not manage, or "".

    They manage `DistributedDataParallel`, DTensors, and `fully_shard` without subclasses of its own. Only looks at
    modules that are already imported: a sharded model has imported its library, and importing is slow.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            return f"{_name(name)} is sharded by FullyShardedDataParallel; use fully_shard"
    for each in list_fsdp_parameters(model):
        if each.offload_to_cpu:
            return "fully_shard has an offload policy, which room.step() takes the place of"
        if hasattr(each._sharded_local_tensor, "fsdp_post_all_gather"):
            return f"parameter {each._param_fqn!r} is of a class that gathers by functions of its own"
    return ""


def list_shard_ranks(model: torch.nn.Module) -> set[int]:
    """Return the ranks, in the default group, over which DTensors spread a model; empty without these."""
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is None:
        return set()
    meshes = (each.device_mesh for each in model.parameters() if isinstance(each, tensor.DTensor))
    return {rank for mesh in dict.fromkeys(meshes) for rank in mesh.mesh.flatten().tolist()}


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


def find_wrapper(model: torch.nn.Module) -> torch.nn.Module:
    """Return the `DistributedDataParallel` module around a model that a framework passes without it; else the model."""
    if "torch.distributed" not in sys.modules or not torch.distributed.is_initialized():
        return model
    wrapper = torch.nn.parallel.DistributedDataParallel
    found = (each for each in gc.get_objects() if type(each) is wrapper and each.module is model)
    return next(found, model)


def list_bucketed(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters whose gradients stay: they are views of one storage, or accessed without an op.

    Those of `DistributedDataParallel` if they are in its buckets, or if it has a static graph: it reads all of them at
    the end of its first backward pass. And what `fully_shard` receives.
    """
    viewing = [each for each in find_replicas(model) if each.gradient_as_bucket_view or each.static_graph]
    bucketed = [parameter for each in viewing for parameter in each.module.parameters()]
    return bucketed + [each.sharded_param for each in list_fsdp_parameters(model)]
