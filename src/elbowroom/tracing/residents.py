"""What of a training job is there before and after a step: parameters, buffers, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from elbowroom.ir.trace import Role

Resident = tuple[torch.Tensor, Role, str]


def list_residents(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> list[Resident]:
    """Every tensor a job keeps between steps, with its role and a label; a tensor may come more than once.

    Cost: less than a microsecond a tensor. A room asks in every step, so modules are walked here: PyTorch's own walk
    takes several times as long.
    """
    parameters: list[Resident] = []
    buffers: list[Resident] = []
    stack, seen = [(model, "")], set[int]()
    while stack:
        module, prefix = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if own := module._parameters:
            parameters += [(each, Role.PARAMETER, prefix + name) for name, each in own.items() if each is not None]
        if kept := module._buffers:
            buffers += [(each, Role.BUFFER, prefix + name) for name, each in kept.items() if each is not None]
        if inner := module._modules:
            children = [(child, f"{prefix}{name}.") for name, child in inner.items() if child is not None]
            stack += reversed(children)
    gradients = [
        (parameter.grad, Role.GRADIENT, f"gradient of {name}")
        for parameter, _, name in parameters
        if parameter.grad is not None
    ]
    known = {id(parameter) for parameter, _, _ in parameters}
    others: list[Resident] = []
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            strange = [each for each in group["params"] if id(each) not in known]
            others += [(each, Role.PARAMETER, f"optimizer {index} parameter") for each in strange]
        for state in optimizer.state.values():
            tensors = [(key, each) for key, each in state.items() if isinstance(each, torch.Tensor)]
            others += [(each, Role.OPTIMIZER_STATE, str(key)) for key, each in tensors]
    return [*parameters, *buffers, *others, *gradients]
