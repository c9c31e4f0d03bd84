"""Has autograd let go of a backward pass that has failed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes


def forget_failed_backward() -> None:
    """Have autograd drop the nodes of this thread that were ready when a backward pass failed, with what they saved.

    It keeps them in the thread's queue until the next backward pass begins, before which the next forward pass may need
    their memory. Does nothing inside a backward pass or a function that `torch.func` transforms.
    """
    if sys.is_finalizing():
        return  # functions that import are of no use any more
    if torch._C._current_graph_task_id() != -1 or torch._C._functorch.peek_interpreter_stack() is not None:
        return
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), _hiding_hooks():
        torch.ones((), device="cpu", requires_grad=True).clone().backward()


@contextlib.contextmanager
def _hiding_hooks() -> Iterator[None]:
    """Have none of the program's saved-tensor hooks called, although it may have forbidden others."""
    forbids: str | None = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    torch._C._autograd._saved_tensors_hooks_enable()
    try:
        with saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
            yield
    finally:
        if forbids is not None:
            torch._C._autograd._saved_tensors_hooks_disable(forbids)
