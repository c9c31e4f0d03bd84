"""What a user would do instead: checkpoint block by block, save everything on the host, or tools of TRL and torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elbowroom.workloads import Workload


class Checkpointed(nn.Module):
    """A block whose inside is computed again in the backward pass."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


def checkpoint_blocks(model: nn.Module) -> int:
    """Checkpoint every residual block, transformer layer or stage of a model. Returns how many there are."""
    for path in ("transformer.h", "encoder.layers", "blocks", "layer1", "layer2", "layer3", "layer4"):
        blocks = _find(model, path)
        if blocks is not None:
            for name, block in list(blocks.named_children()):
                setattr(blocks, name, Checkpointed(block))
    features = _find(model, "features")
    if isinstance(features, nn.Sequential):
        stages: list[list[nn.Module]] = [[]]
        for layer in features:
            stages[-1].append(layer)
            if isinstance(layer, nn.MaxPool2d):
                stages.append([])
        model.features = nn.Sequential(*(Checkpointed(nn.Sequential(*stage)) for stage in stages if stage))
    return sum(isinstance(module, Checkpointed) for module in model.modules())


def _find(model: nn.Module, path: str) -> Any:
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def save_on_host(workload: Workload, *, pin_memory: bool) -> Callable[[], object]:
    """The step of a workload with every saved tensor on the host between forward and backward."""

    def step() -> object:
        with torch.autograd.graph.save_on_cpu(pin_memory=pin_memory):
            return workload.step()

    return step


def offload_activations(workload: Workload) -> Callable[[], object]:
    """Return the step of a workload under TRL's `OffloadActivations`.

    Raises:
        ImportError: TRL is not installed.
    """
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    context = get_act_offloading_ctx_manager(model=workload.model, use_streams=True)

    def step() -> object:
        with context:
            loss = workload.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        workload.optimizer.step()
        workload.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def offload_optimizer(workload: Workload) -> Callable[[], object]:
    """Return the step of a workload whose AdamW is torchao's `CPUOffloadOptimizer`.

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao.optim import CPUOffloadOptimizer

    workload.optimizer.state.clear()
    rate = workload.optimizer.defaults["lr"]
    optimizer = CPUOffloadOptimizer(workload.model.parameters(), torch.optim.AdamW, lr=rate)

    def step() -> object:
        loss = workload.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
