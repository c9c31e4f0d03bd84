"""Nets for images of 32 pixels: what AutoSwap's and SmartPool's authors plan with in their own examples.

`cifar:build` is VGG-16, `cifar:build_alexnet` and `cifar:build_resnet` are the others they name.

Source: Simonyan, Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015, table 1,
column D; with batch norm and one hidden layer of 512 instead of two of 4,096, as is usual for CIFAR-10; He et al.,
"Deep Residual Learning", CVPR 2016, section 4.2, with n = 3 and projections; Krizhevsky, Sutskever, Hinton, NIPS 2012,
with kernels and strides for small images. Inferred: that the examples' nets are these.
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
    return _train(nn.Sequential(*layers, *head), batch, (optimizer, dtype, device))


def build_alexnet(
    batch: int = 100, optimizer: str = "sgd", dtype: str = "float32", device: str = "cpu"
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A workload: AlexNet."""
    layers: list[nn.Module] = []
    before = 3
    for width, pools in ((64, True), (192, True), (384, False), (256, False), (256, True)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()]
        before = width
        if pools:
            layers.append(nn.MaxPool2d(2))
    head = [
        nn.Flatten(),
        nn.Linear(before * 16, 1024),
        nn.ReLU(),
        nn.Linear(1024, 512),
        nn.ReLU(),
        nn.Linear(512, CLASSES),
    ]
    return _train(nn.Sequential(*layers, *head), batch, (optimizer, dtype, device))


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        projection = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        self.around = nn.Identity() if (before, stride) == (width, 1) else projection

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The sum of both ways."""
        return functional.relu(self.inner(inputs) + self.around(inputs))


def build_resnet(
    batch: int = 100, optimizer: str = "sgd", dtype: str = "float32", device: str = "cpu"
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A workload: ResNet-20."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    before = 16
    for width in (16, 32, 64):
        for index in range(3):
            layers.append(Block(before, width, 2 if index == 0 and width > 16 else 1))
            before = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES)]
    return _train(nn.Sequential(*layers, *head), batch, (optimizer, dtype, device))


def _train(
    model: nn.Module, batch: int, options: tuple[str, str, str]
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    if options != ("sgd", "float32", "cpu"):
        raise ValueError("these nets are for sgd, in float32, on a CPU")
    rule = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(CLASSES, (batch,))

    def step() -> torch.Tensor:
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        rule.step()
        rule.zero_grad(set_to_none=True)
        return loss.detach()

    return model, rule, step
