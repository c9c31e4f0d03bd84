"""What of a training job is there before and after a step: parameters, buffers, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.optim import Optimizer

from elbowroom.ir.trace import Role

Resident = tuple[torch.Tensor, Role, str]


def list_residents(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Resident]:
    """Every tensor a job keeps between steps, with its role and a label; a tensor may come more than once."""
    parameters = list(model.named_parameters())  # to find them takes long where there are many modules
    for name, parameter in parameters:
        yield parameter, Role.PARAMETER, name
    for name, buffer in model.named_buffers():
        yield buffer, Role.BUFFER, name
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, Role.PARAMETER, f"optimizer {index} parameter"
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield value, Role.OPTIMIZER_STATE, str(key)
    for name, parameter in parameters:
        if parameter.grad is not None:
            yield parameter.grad, Role.GRADIENT, f"gradient of {name}"
