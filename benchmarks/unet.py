"""The U-Net as it was published, for `unet:build`: 64 channels at full size, five levels, with batch norm.

Source: Ronneberger, Fischer, Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation", MICCAI 2015,
figure 1; batch norm and padded convolutions are what is trained today, and not in the paper.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

WIDTH, LEVELS, CLASSES = 64, 5, 2


class UNet(nn.Module):
    """What the way down makes stays until the way up comes back to it."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH << level for level in range(LEVELS)]
        self.down = nn.ModuleList(
            make_block(before, after) for before, after in zip([3, *widths[:-1]], widths, strict=True)
        )
        steps = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(below, here, 2, stride=2) for below, here in steps)
        self.up = nn.ModuleList(make_block(2 * here, here) for _, here in steps)
        self.head = nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Scores of each class at each pixel."""
        skipped = []
        for level, block in enumerate(self.down):
            image = block(functional.max_pool2d(image, 2) if level else image)
            skipped.append(image)
        skipped.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            image = block(torch.cat((skipped.pop(), grow(image)), dim=1))
        scores: torch.Tensor = self.head(image)
        return scores


def make_block(before: int, after: int) -> nn.Sequential:
    """Two convolutions."""
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
        nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True),
    )  # fmt: skip


def build(
    batch: int = 8, image_size: int = 256, dtype: str = "float32", optimizer: str = "sgd", device: str = "cpu"
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]]:
    """A workload: model, optimizer, step."""
    with torch.device(device):  # made in place: what is fake cannot be moved
        model = UNet()
    rule = (
        torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        if optimizer == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=1e-4)
    )
    images = torch.randn(batch, 3, image_size, image_size, device=device)
    labels = torch.randint(CLASSES, (batch, image_size, image_size), device=device)

    def step() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        rule.step()
        rule.zero_grad(set_to_none=True)
        return loss.detach()

    return model, rule, step
