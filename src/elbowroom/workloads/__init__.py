"""Real training steps by name, for the command line, the demo, the benchmarks and the tests.

    torchvision:resnet50          a model of torchvision, random weights, synthetic images
    timm:vit_base_patch16_224     a model of timm, likewise
    transformers:gpt2-medium      a model of transformers by its published figures, random weights, synthetic tokens
    transformers:llama            a model type of transformers, with its default configuration
    package.module:function       your own function; it returns (model, optimizer, step)

Nothing is downloaded. The folder is the registry: each public module is one source of models with one entry point,
`build_workload(name, options)`. `function` handles all other names.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from elbowroom import _family
from elbowroom.errors import UsageError

DataType = Literal["float32", "bfloat16"]
OptimizerName = Literal["adamw", "sgd"]

_OWN_FUNCTION = "function"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training step that can be repeated on the same batch.

    Attributes:
        name: spec of the workload.
        model: the model, in training mode.
        optimizer: optimizer of all parameters.
        step: forward, `loss.backward()`, `optimizer.step()`, `optimizer.zero_grad(set_to_none=True)`; returns the
            detached loss.
        forward: the forward pass alone; returns the loss, with its graph.
        batch: the input tensors by name; empty for a user's function.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], torch.Tensor]
    forward: Callable[[], torch.Tensor]
    batch: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of a workload; see `build`.

    Attributes:
        given: names of the options that the caller set. A source refuses those that it does not support, and uses its
            own defaults for the others.
    """

    batch: int = 8
    image_size: int | None = None
    sequence_length: int | None = None
    layers: int | None = None
    dtype: DataType = "float32"
    optimizer: OptimizerName = "adamw"
    device: str = "cpu"
    seed: int = 0
    channels_last: bool = False
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("batch", "image_size", "sequence_length", "layers"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
        for name, choices in (("dtype", get_args(DataType)), ("optimizer", get_args(OptimizerName))):
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise UsageError(f"seed must be a whole number from 0 to 2**63 - 1, not {self.seed!r}")
        _check_device(self.device)

    def refuse(self, names: tuple[str, ...], owner: str, reason: str) -> None:
        """Refuse options that a workload does not support.

        Raises:
            UsageError: the caller set one of `names`.
        """
        for name in names:
            if name in self.given:
                raise UsageError(f"{owner} takes no {name}: {reason}")


def _check_device(device: str) -> None:
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or str(device).endswith(":"):
        raise UsageError(f"device must be 'cpu', 'cuda' or 'cuda:N', not {device!r}")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"device {device!r} is not available: torch {torch.__version__} finds no GPU")
        if index and int(index) >= torch.cuda.device_count():
            raise UsageError(f"there is no device {device!r}; this machine has {torch.cuda.device_count()} GPUs")


def sources() -> tuple[str, ...]:
    """Return the packages of models: the names before the colon, other than a user's module."""
    return tuple(name for name in _family.names(sys.modules[__name__]) if name != _OWN_FUNCTION)


def build(
    spec: str,
    *,
    batch: int | None = None,
    image_size: int | None = None,
    sequence_length: int | None = None,
    layers: int | None = None,
    dtype: DataType | None = None,
    optimizer: OptimizerName | None = None,
    device: str | None = None,
    seed: int | None = None,
    channels_last: bool | None = None,
) -> Workload:
    """Build a real training step.

    The result depends only on the spec and the options: torch's generators are seeded before the model is built, and
    again at the end, so that the steps draw the same numbers in any case. Inside a `FakeTensorMode` nothing is
    allocated, so that a model of any size can be captured; timm's models do not support that.

    Args:
        spec: `torchvision:NAME`, `timm:NAME`, `transformers:NAME`, or `package.module:function`. A function receives
            the given options as keyword arguments, and returns (model, optimizer, step) or a `Workload`.
        batch: number of samples; by default 8.
        image_size: height and width of the images in pixels; by default the model's own.
        sequence_length: tokens in a sample; by default 128, or the model's maximum if that is less.
        layers: number of layers of the model, instead of its own (transformers only).
        dtype: "float32", or "bfloat16" for autocast; the parameters stay float32.
        optimizer: "adamw", or "sgd" with momentum 0.9.
        device: "cpu", "cuda" or "cuda:N".
        seed: seed of the weights, the batch and the steps; by default 0.
        channels_last: whether to use the channels-last memory format for model and images.

    Raises:
        UsageError: the spec or an option is invalid, they do not fit together, or a package is missing.
    """
    source, colon, name = spec.partition(":")
    if not (colon and source and name):
        raise UsageError(
            f"{spec!r} names no workload; write {', '.join(f'{known}:NAME' for known in sources())} "
            "or package.module:function"
        )
    asked = {
        "batch": batch,
        "image_size": image_size,
        "sequence_length": sequence_length,
        "layers": layers,
        "dtype": dtype,
        "optimizer": optimizer,
        "device": device,
        "seed": seed,
        "channels_last": channels_last,
    }
    given = {option: value for option, value in asked.items() if value is not None}
    options = Options(**given, given=tuple(given))  # type: ignore[arg-type]
    member, what = (source, name) if source in sources() else (_OWN_FUNCTION, spec)
    build_workload = _family.get(sys.modules[__name__], member, "build_workload")
    torch.manual_seed(options.seed)
    workload: Workload = build_workload(what, options)
    torch.manual_seed(options.seed)
    return dataclasses.replace(workload, name=spec)
