"""VGG-16 for images of 32 pixels, for `cifar:build`: what AutoSwap's authors plan with in their own examples.

Source: Simonyan, Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015, table 1,
column D; with batch norm and one hidden layer of 512 instead of two of 4,096, as is usual for CIFAR-10. Inferred: that
the example's net is this one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
HIDDEN, CLASSES = 512, 10


def build(
    batch: int = 100, optimizer: str = "sgd", dtype: str = "float32", device: str = "cpu"
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A workload: model, optimizer, step."""
    layers: list[nn.Module] = []
    before = 3
    for widths in WIDTHS:
        for width in widths:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            before = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(before, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)]
    model = nn.Sequential(*layers, *head)
    if (optimizer, dtype, device) != ("sgd", "float32", "cpu"):
        raise ValueError("this net is for sgd, in float32, on a CPU")
    rule = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(CLASSES, (batch,))

    def step() -> torch.Tensor:
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        rule.step()
        rule.zero_grad(set_to_none=True)
        return loss.detach()

    return model, rule, step
