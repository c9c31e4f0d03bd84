"""Builds a training step from a model and a batch, for all sources of models."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from elbowroom.workloads import Options, Workload


def training_workload(
    name: str,
    model: nn.Module,
    batch: dict[str, torch.Tensor],
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor],
    options: Options,
) -> Workload:
    """Build a workload from a model, its batch and its loss.

    Sets the model to training mode, and moves model and batch to the device and memory format of the options.
    """
    model.train()
    device_type = torch.device(options.device).type
    # Fake parameters cannot be moved, so skip this for a model that was built on the device.
    if any(tensor.device.type != device_type for tensor in (*model.parameters(), *model.buffers())):
        model.to(options.device)
    batch = {key: value.to(options.device) for key, value in batch.items()}
    if options.channels_last:
        # mypy knows only the other signatures of `Module.to`.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        batch = {
            key: value.contiguous(memory_format=torch.channels_last) if value.dim() == 4 else value
            for key, value in batch.items()
        }
    optimizer = make_optimizer(model, options)
    autocast = options.dtype == "bfloat16"

    def forward() -> torch.Tensor:
        with torch.autocast(device_type, dtype=torch.bfloat16, enabled=autocast):
            return loss(model, batch)

    def step() -> torch.Tensor:
        value = forward()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return Workload(name=name, model=model, optimizer=optimizer, step=step, forward=forward, batch=batch)


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.Optimizer:
    """Create the optimizer of all parameters."""
    if options.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def image_batch(options: Options, shape: tuple[int, ...], classes: int) -> dict[str, torch.Tensor]:
    """Return random images of one shape, channels first, with random labels."""
    return {
        "images": torch.randn(options.batch, *shape, device=options.device),
        "labels": torch.randint(classes, (options.batch,), device=options.device),
    }


def classification_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the cross-entropy; auxiliary classifiers have weight 0.3.

    Source: Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, section 5 (the weight 0.3).
    """
    output = model(batch["images"])
    logits, *auxiliary = output if isinstance(output, tuple) else (output,)
    loss = nn.functional.cross_entropy(logits, batch["labels"])
    for extra in auxiliary:
        loss = loss + 0.3 * nn.functional.cross_entropy(extra, batch["labels"])
    return loss
