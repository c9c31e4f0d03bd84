"""Models of torchvision: image classification and semantic segmentation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elbowroom.workloads import Options, Workload
from elbowroom.workloads._packages import import_package, unknown_name
from elbowroom.workloads._training import classification_loss, image_batch, training_workload

_IMAGE_SIZE = 224
# Models whose published training uses another size, or whose layers require it.
_IMAGE_SIZES = {"inception_v3": 299}
_CLASSES = 1000
_SEGMENTATION_CLASSES = 21


def build_workload(name: str, options: Options) -> Workload:
    """Build a training step of `torchvision.models.NAME` with random weights.

    Raises:
        UsageError: torchvision is missing, has no such image model, or an option is for language models.
    """
    owner = f"torchvision:{name}"
    models = import_package("torchvision").models
    classification = models.list_models(module=models)
    segmentation = models.list_models(module=models.segmentation)
    if name not in (*classification, *segmentation):
        raise unknown_name("torchvision", "classifier or segmenter", name, [*classification, *segmentation])
    options.refuse(("sequence_length",), owner, "it takes images")
    options.refuse(("layers",), owner, "the number of layers is part of its name")
    size = options.image_size or _IMAGE_SIZES.get(name, _IMAGE_SIZE)
    with torch.device(options.device):
        if name in segmentation:
            model = models.get_model(name, weights=None, weights_backbone=None)
            labels = torch.randint(_SEGMENTATION_CLASSES, (options.batch, size, size))
            batch = {"images": torch.randn(options.batch, 3, size, size), "labels": labels}
            return training_workload(owner, model, batch, _segmentation_loss, options)
        model = models.get_model(name, weights=None, **_figures(name, size))
        batch = image_batch(options, (3, size, size), _CLASSES)
    return training_workload(owner, model, batch, classification_loss, options)


def _figures(name: str, size: int) -> dict[str, Any]:
    """Return the constructor's arguments: most models take any image size, a few are built for one."""
    if name.startswith("vit_"):
        return {"image_size": size}
    if name.startswith("maxvit"):
        return {"input_size": (size, size)}
    if name in ("googlenet", "inception_v3"):
        # Their own initialisation with scipy takes minutes; torch's is as good for a workload.
        return {"init_weights": False}
    return {}


def _segmentation_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(batch["images"])
    loss = nn.functional.cross_entropy(output["out"], batch["labels"])
    if "aux" in output:
        loss = loss + 0.5 * nn.functional.cross_entropy(output["aux"], batch["labels"])
    return loss
