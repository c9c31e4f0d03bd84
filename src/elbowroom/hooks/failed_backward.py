"""Has autograd let go of a backward pass that has failed."""

from __future__ import annotations

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes


def forget_failed_backward() -> None:
    """Have autograd drop the nodes of this thread that were ready when a backward pass failed, with what they saved.

    It keeps them in the thread's queue until the next backward pass begins, before which the next forward pass may need
    their memory. Does nothing inside a backward pass.
    """
    if torch._C._current_graph_task_id() != -1:
        return
    with _disable_current_modes(), torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
        torch.ones((), requires_grad=True).clone().backward()
