"""Training job: a model with its optimizers and the user's options."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch.optim import Optimizer

from elbowroom.config import Config
from elbowroom.hooks.sharded import find_replicas, list_bucketed
from elbowroom.tracing.residents import Resident, list_resident_tensors, list_residents


@dataclasses.dataclass(frozen=True)
class Job:
    """A training job on one device."""

    model: torch.nn.Module
    optimizers: tuple[Optimizer, ...]
    device: torch.device
    config: Config

    @property
    def name(self) -> str:
        """Class name of the model."""
        return type(self.model).__name__

    @property
    def moves_state(self) -> bool:
        """True if parameters, gradients and optimizer state may leave the device."""
        return self.config.manages == "everything"

    def list_residents(self) -> list[torch.Tensor]:
        """List parameters, gradients, buffers and optimizer state."""
        return list_resident_tensors(self.model, self.optimizers)

    def list_movable(self) -> list[torch.Tensor]:
        """List those of them that may leave the device."""
        staying = {id(each.grad) for each in self._bucketed if each.grad is not None}
        return [each for each in self.list_residents() if id(each) not in staying]

    @functools.cached_property
    def _bucketed(self) -> list[torch.nn.Parameter]:
        return list_bucketed(find_replicas(self.model))

    def name_residents(self) -> list[Resident]:
        """List them with their roles and labels."""
        return list_residents(self.model, self.optimizers)
