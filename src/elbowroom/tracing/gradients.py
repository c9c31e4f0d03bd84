"""Tells a tracer which storages are gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from elbowroom.tracing.tracer import Tracer


@contextlib.contextmanager
def telling_gradients(tracer: Tracer, model: torch.nn.Module) -> Iterator[None]:
    """Report each gradient of a model to a tracer as it is accumulated."""

    def tell(name: str) -> Callable[[torch.Tensor], None]:
        def told(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                tracer.gradient(parameter.grad, name)

        return told

    handles = [
        parameter.register_post_accumulate_grad_hook(tell(name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.is_leaf
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
