"""What of a training job is there before and after a step: parameters, buffers, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.optim import Optimizer

from elbowroom.ir.trace import Role

Resident = tuple[torch.Tensor, Role, str]


def list_residents(model: torch.nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[Resident]:
    """Every tensor a job keeps between steps, with its role and a label; a tensor may come more than once.

    Cost: a microsecond a tensor. A room asks in every step, so modules are walked here: PyTorch's own walk takes thrice
    as long.
    """
    parameters: list[tuple[torch.nn.Parameter, str]] = []
    buffers: list[tuple[torch.Tensor, str]] = []
    stack, seen = [(model, "")], set[int]()
    while stack:
        module, prefix = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        parameters += [(each, prefix + name) for name, each in module._parameters.items() if each is not None]
        buffers += [(each, prefix + name) for name, each in module._buffers.items() if each is not None]
        children = [(child, f"{prefix}{name}.") for name, child in module._modules.items() if child is not None]
        stack += reversed(children)
    known = {id(parameter) for parameter, _ in parameters}
    for parameter, name in parameters:
        yield parameter, Role.PARAMETER, name
    for buffer, name in buffers:
        yield buffer, Role.BUFFER, name
    for index, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    yield parameter, Role.PARAMETER, f"optimizer {index} parameter"
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield value, Role.OPTIMIZER_STATE, str(key)
    for parameter, name in parameters:
        if parameter.grad is not None:
            yield parameter.grad, Role.GRADIENT, f"gradient of {name}"
