"""Models of timm: image classification."""

from __future__ import annotations

import torch

from elbowroom.errors import UsageError
from elbowroom.workloads import Options, Workload
from elbowroom.workloads._packages import import_package, unknown_name
from elbowroom.workloads._training import classification_loss, image_batch, training_workload

_CLASSES = 1000


def build_workload(name: str, options: Options) -> Workload:
    """Build a training step of `timm.create_model(NAME)` with random weights and 1000 classes.

    Raises:
        UsageError: timm is missing, has no such model, or an option does not fit it.
    """
    owner = f"timm:{name}"
    timm = import_package("timm")
    # `is_model` also rejects names such as hf-hub:..., which would be downloaded.
    if not timm.is_model(name):
        raise unknown_name("timm", "model", name, timm.list_models())
    options.refuse(("sequence_length",), owner, "it takes images")
    options.refuse(("layers",), owner, "the number of layers is part of its name")
    published = timm.get_pretrained_cfg(name)
    channels, height, width = published.input_size
    figures: dict[str, int] = {}
    if options.image_size is not None:
        height = width = options.image_size
        if published.fixed_input_size:
            figures["img_size"] = options.image_size
    with torch.device(options.device):
        try:
            model = timm.create_model(name, pretrained=False, num_classes=_CLASSES, **figures)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            if not figures:
                raise
            raise UsageError(f"{owner} cannot be built for images of {height} pixels: {error}") from error
        batch = image_batch(options, (channels, height, width), _CLASSES)
    return training_workload(owner, model, batch, classification_loss, options)
