"""Training job: a model with its optimizers and the user's options."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import torch
from torch.optim import Optimizer

from elbowroom.config import Config
from elbowroom.hooks.several_models import list_models
from elbowroom.hooks.sharded import is_sharded, list_bucketed
from elbowroom.hooks.storage_ids import get_any_storage, unwrap
from elbowroom.ir.trace import Role
from elbowroom.tracing.residents import (
    OptimizerStates,
    Resident,
    list_kept_tensors,
    list_resident_tensors,
    list_residents,
)


@dataclasses.dataclass(frozen=True)
class Job:
    """A training job on one device."""

    model: torch.nn.Module
    optimizers: tuple[Optimizer, ...]
    device: torch.device
    config: Config

    @property
    def name(self) -> str:
        """Class name of the model, or of the first one."""
        return type(list_models(self.model)[0]).__name__

    @property
    def moves_state(self) -> bool:
        """True if parameters, gradients and optimizer state may leave the device."""
        return self.config.manages == "everything" and not self._shards_on_streams

    def list_residents(self) -> list[torch.Tensor]:
        """List parameters, gradients, buffers and optimizer state."""
        return list_resident_tensors(self.model, self.optimizers)

    def list_kept(self) -> list[torch.Tensor]:
        """List parameters, buffers and optimizer state, as the job holds them."""
        return list_kept_tensors(self.model, self.optimizers)

    def name_trained(self) -> tuple[int, ...]:
        """Return what tells the optimizers' parameters that get gradients from others: their ids."""
        found: list[int] = []  # of some hundred parameters in each step
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                found += [id(each) for each in group["params"] if each.requires_grad]
        return tuple(found)

    @functools.cached_property
    def optimizer_states(self) -> OptimizerStates:
        """Notices when they are replaced."""
        return OptimizerStates(self.optimizers)

    def count_parameters(self) -> Counter[int]:
        """Return how many storages of parameters have how many bytes; of shards those of this rank."""
        parameters = (each.tensor for each in self.name_residents() if each.role is Role.PARAMETER)
        storages = (storage for each in parameters if (storage := get_any_storage(each)) is not None)
        return Counter({each._cdata: each.nbytes() for each in storages}.values())

    def list_movable(self) -> list[torch.Tensor]:
        """List those of them that may leave the device."""
        if self._shards_on_streams:
            return []
        gradients = [part for each in self._bucketed if each.grad is not None for part in unwrap(each.grad)]
        staying = set(map(id, gradients))
        return [each for each in self.list_residents() if id(each) not in staying]

    @functools.cached_property
    def _bucketed(self) -> list[torch.nn.Parameter]:
        return list_bucketed(self.model)

    @functools.cached_property
    def _shards_on_streams(self) -> bool:
        """True if FSDP reads its shards on streams of its own, of which the pager does not know."""
        return self.device.type == "cuda" and is_sharded(self.model)

    def name_residents(self) -> list[Resident]:
        """List them with their roles and labels."""
        return list_residents(self.model, self.optimizers)
