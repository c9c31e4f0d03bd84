"""Brings gradients back to memory before DistributedDataParallel reads them.

Its reducer asks a gradient for its address as soon as it has been accumulated, which no op tells; with a static graph,
in its first backward pass, it asks all of them at the end.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from elbowroom.hooks.exposed_memory import Restorer
from elbowroom.hooks.storage_ids import get_plain_storage


class ReplicaGradients:
    """Hooks on the parameters of replicas, called between the accumulation of a gradient and the reducer.

    Args:
        replicas: `DistributedDataParallel` modules of a model.
        restorer: brings back bytes that are away. It is not kept alive.
    """

    def __init__(self, replicas: Sequence[Any], restorer: Restorer) -> None:
        self._restorer = weakref.ref(restorer)
        parameters = dict.fromkeys(parameter for each in replicas for parameter in each.module.parameters())
        late = [parameter for each in replicas if each.static_graph for parameter in each.module.parameters()]
        self._late = set(map(id, late))
        restore = weakref.WeakMethod(self._restore)

        def call(parameter: torch.Tensor) -> None:
            if (method := restore()) is not None:
                method(parameter)

        self._handles = [each.register_post_accumulate_grad_hook(call) for each in parameters if each.requires_grad]

    def close(self) -> None:
        """Remove the hooks."""
        while self._handles:
            self._handles.pop().remove()

    def _restore(self, parameter: torch.Tensor) -> None:
        restorer, gradient = self._restorer(), parameter.grad
        storage = None if gradient is None else get_plain_storage(gradient)
        is_late = id(parameter) in self._late
        if restorer is not None and storage is not None and (is_late or restorer.is_away(storage)):
            restorer.hold_storage(storage, is_written=False, is_lasting=is_late)
