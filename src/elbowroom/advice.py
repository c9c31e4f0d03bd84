"""Advice for a training job that does not fit into its budget."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
from torch.optim import Optimizer

from elbowroom.errors import Infeasible
from elbowroom.hooks.grouped_step import PARTLY_UPDATED, find_groupable
from elbowroom.runtime.shortage import locate_shortage
from elbowroom.units import format_bytes

MOST_OF_IT = 0.5
"""Share of the needed bytes from which on the advice concerns parameters, gradients and optimizer state."""


def advise(error: Infeasible, model: torch.nn.Module, optimizers: Sequence[Optimizer], *, moves_state: bool) -> None:
    """Add advice for this job to an error, unless it has advice already.

    Args:
        moves_state: whether parameters, gradients and optimizer state may leave the device.
    """
    if not error.advice:
        error.advise(_find_advice(error, model, optimizers, moves_state=moves_state))


def complete(error: Infeasible, model: torch.nn.Module, optimizers: Sequence[Optimizer], *, moves_state: bool) -> None:
    """Add the place and advice to an error that ends a step. Arguments: as for `advise`."""
    locate_shortage(error, model)
    advise(error, model, optimizers, moves_state=moves_state)


def note_torn_update(error: Exception, optimizers: Sequence[Optimizer]) -> None:
    """Add a note to an error in the step of an optimizer, if that runs whole: groups of parameters add their own."""
    whole = [each for each in optimizers if each not in find_groupable(optimizers)]
    place = error.__traceback__
    while place is not None:
        frame = place.tb_frame
        code = frame.f_code
        own = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "step" and code.co_argcount else None
        if any(own is each for each in whole):
            error.add_note(PARTLY_UPDATED)
            return
        place = place.tb_next


def _find_advice(
    error: Infeasible, model: torch.nn.Module, optimizers: Sequence[Optimizer], *, moves_state: bool
) -> Iterator[str]:
    if error.state_bytes > MOST_OF_IT * error.needed_bytes:
        where = "cannot leave meanwhile" if moves_state else 'never leave the device with manages="activations"'
        yield (
            f"Parameters, gradients and optimizer state take {format_bytes(error.state_bytes)} of this and {where}: "
            "use an optimizer with less state, fewer trainable parameters or a smaller dtype."
        )
    if "_foreach_" in error.op or any(_is_foreach(each) for each in optimizers):
        yield (
            "An optimizer works on all parameters at once (foreach), with temporaries as large as all of them: "
            "construct it with fused=True or foreach=False."
        )
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()) or _is_in_checkpoint(error):
        yield (
            "Gradient checkpointing is on, and hides the tensors that it recomputes from Elbowroom, which can "
            "recompute and offload them itself: turn it off."
        )


def _is_foreach(optimizer: Optimizer) -> bool:
    groups = optimizer.param_groups
    is_cuda = any(each.is_cuda for group in groups for each in group["params"])
    # PyTorch's default: foreach on CUDA, a for-loop on a CPU.
    return any(
        not group.get("fused") and (group.get("foreach") or (is_cuda and group.get("foreach", False) is None))
        for group in groups
    )


def _is_in_checkpoint(error: Infeasible) -> bool:
    checkpoint = sys.modules.get("torch.utils.checkpoint")
    path = None if checkpoint is None else checkpoint.__file__
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            return True
        trace = trace.tb_next
    return False
