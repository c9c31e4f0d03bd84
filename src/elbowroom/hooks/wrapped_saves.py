"""Takes DTensors apart that autograd saves: what may leave the device is the tensor of this rank."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from elbowroom.hooks.storage_ids import get_plain_storage


class Opened(NamedTuple):
    """A DTensor that was taken apart.

    Attributes:
        local: alias of this rank's tensor, with a version counter of its own: PyTorch checks the DTensor's.
        close: makes a DTensor of such a tensor again.
    """

    local: torch.Tensor
    close: Callable[[torch.Tensor], torch.Tensor]


def open_wrapper(tensor: Any) -> Opened | None:
    """Take a saved tensor apart; None if it is no DTensor, or if what it holds is still to be received."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    if module is None or type(tensor) is not module.DTensor:
        return None
    local = tensor._local_tensor
    if get_plain_storage(local) is None:
        return None
    make: Callable[..., torch.Tensor] = module.DTensor
    close = functools.partial(make, spec=tensor._spec, requires_grad=tensor.requires_grad)
    return Opened(local.data, close)
