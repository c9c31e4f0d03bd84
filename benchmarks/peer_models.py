"""Models that `peers.py` trains, and where their blocks are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from unet import UNet

from elbowroom.workloads import Workload, build
from elbowroom.workloads._packages import import_package


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerModel:
    """A model that all contenders train.

    Attributes:
        title: name and batch, for the table.
        make: builds a workload; called with True for a small model of the same kind.
        containers: paths of the modules whose children are blocks, in the order in which they run.
        sizes: numbers of consecutive blocks that checkpointing takes together.
        writes_kept: whether ops in place write to results that selective checkpointing keeps.
    """

    title: str
    make: Callable[[bool], Workload]
    containers: tuple[str, ...]
    sizes: tuple[int, ...] = (1, 2, 4)
    writes_kept: bool = False


def _build(spec: str, full: dict[str, Any], small: dict[str, Any], optimizer: str = "adamw") -> Callable[[bool], Any]:
    return lambda is_small: build(spec, seed=0, optimizer=optimizer, **{**full, **(small if is_small else {})})


def _own(name: str, model: nn.Module, batch: dict[str, torch.Tensor], forward: Callable[[], torch.Tensor]) -> Workload:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    workload = Workload(name=name, model=model, optimizer=optimizer, step=forward, forward=forward, batch=batch)
    return replace(workload, step=lambda: train(workload))


def make_unet(is_small: bool) -> Workload:
    """A U-Net, trained with SGD and momentum."""
    torch.manual_seed(0)
    model, size = UNet(), 32 if is_small else 128
    batch = {"images": torch.randn(2, 3, size, size), "labels": torch.randint(2, (2, size, size))}
    made = _own("unet", model, batch, lambda: nn.functional.cross_entropy(model(batch["images"]), batch["labels"]))
    return with_optimizer(made, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))


def make_mixture_of_experts(is_small: bool) -> Workload:
    """A Mixtral of eight layers with eight experts each, on sequences of 128 tokens."""
    torch.manual_seed(0)
    transformers = import_package("transformers")
    config = transformers.MixtralConfig(
        vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=2 if is_small else 8,
        num_attention_heads=8, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).train()
    tokens = torch.randint(0, 8192, (2 if is_small else 8, 128))
    return _own("mixtral", model, {"tokens": tokens}, lambda: model(input_ids=tokens, labels=tokens).loss)


def train(workload: Workload) -> torch.Tensor:
    """Do one step of a workload with its optimizer. Returns the loss, detached."""
    loss = workload.forward()
    loss.backward()  # type: ignore[no-untyped-call]
    workload.optimizer.step()
    workload.optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def with_optimizer(workload: Workload, optimizer: torch.optim.Optimizer) -> Workload:
    """Return a workload with another optimizer."""
    changed = replace(workload, optimizer=optimizer)
    return replace(changed, step=lambda: train(changed))


def with_forward(workload: Workload, forward: Callable[[], torch.Tensor]) -> Workload:
    """Return a workload whose forward pass is another function."""
    changed = replace(workload, forward=forward)
    return replace(changed, step=lambda: train(changed))


RESNET = tuple(f"layer{number}" for number in range(1, 5))
MODELS: dict[str, PeerModel] = {
    "resnet50": PeerModel(
        title="ResNet-50, batch 8, 160x160, SGD with momentum",
        make=_build("torchvision:resnet50", {"batch": 8, "image_size": 160}, {"batch": 2, "image_size": 64}, "sgd"),
        containers=RESNET,
    ),
    "efficientnet_b0": PeerModel(
        title="EfficientNet-B0, batch 4, 224x224, AdamW",
        make=_build("torchvision:efficientnet_b0", {"batch": 4}, {"batch": 2, "image_size": 64}),
        containers=tuple(f"features.{number}" for number in range(1, 8)),
        writes_kept=True,
    ),
    "vit_small": PeerModel(
        title="ViT-S/16, batch 6, 224x224, AdamW",
        make=_build("timm:vit_small_patch16_224", {"batch": 6}, {"batch": 1}),
        containers=("blocks",),
    ),
    "unet": PeerModel(
        title="U-Net, batch 2, 128x128, SGD with momentum",
        make=make_unet,
        containers=(*(f"down.{level}" for level in range(5)), *(f"up.{level}" for level in range(4))),
        sizes=(3, 6),
    ),
    "gpt2": PeerModel(
        title="GPT-2 small, batch 1, 128 tokens, AdamW",
        make=_build("transformers:gpt2", {"batch": 1, "sequence_length": 128}, {"sequence_length": 32, "layers": 2}),
        containers=("transformer.h",),
    ),
    "mixture": PeerModel(
        title="Mixtral, 8 layers, batch 8, 128 tokens, AdamW",
        make=make_mixture_of_experts,
        containers=("model.layers",),
    ),
}
