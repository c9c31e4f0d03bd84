"""Losses of class indices: along the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import Alternatives, PartialRule, SliceRule, cut, make_loop, make_pass

NONE = 0
MEAN = 1
SUM = 2
"""Values of `reduction`."""


def _find_passes(call: OpCall) -> Alternatives:
    """Cut the forward pass.

    A mean is not summed over slices, since only the whole batch gives the number by which it divides.
    """
    some, target = call["self"], call["target"]
    if some.ndim != target.ndim + 1:
        return ()
    reads = {"self": 0, "target": 0}
    if call["reduction"] == NONE:
        return ((cut(call, some.shape[0], reads, {0: 0}),),)
    found = []
    if call["weight"] is None and some.shape[0]:
        loop = make_loop(call, some.shape[0], reads, {})
        found.append((dataclasses.replace(make_pass(call, [loop]), is_partial=True),))
    if call["reduction"] == SUM:
        found.append((cut(call, some.shape[0], reads, {}, sums=True),))
    return tuple(found)


def _pick(values: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return the elements of a slice that the loss is computed from, with their target; ignored ones have -1."""
    target = values["target"].unsqueeze(1)
    is_ignored = target == values["ignore_index"]
    wrong = target[((target < 0) | (target >= values["self"].shape[1])) & ~is_ignored]
    if wrong.numel():
        raise IndexError(f"Target {wrong[0].item()} is out of bounds.")  # PyTorch's message
    picked = values["self"].gather(1, target.masked_fill(is_ignored, 0))
    return picked, torch.zeros_like(target).masked_fill_(is_ignored, -1).squeeze(1)


def _combine(call: OpCall, slices: Sequence[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Return the loss of the picked elements: the op itself, with a single class."""
    picked = torch.cat([each for each, _ in slices])
    target = torch.cat([each for _, each in slices])
    return call.run({**call.values, "self": picked, "target": target, "ignore_index": -1})


def _find_passes_backward(call: OpCall) -> Alternatives:
    some, target = call["self"], call["target"]
    if some.ndim != target.ndim + 1:
        return ()
    reads = {"self": 0, "target": 0}
    if call["reduction"] == NONE:
        reads["grad_output"] = 0
    return ((cut(call, some.shape[0], reads, {0: 0}, unread={"self"}),),)


_INDICES = {"target": lambda call: call["self"].shape[1]}
_PARTIAL = PartialRule(_pick, _combine)

RULES = {
    "aten.nll_loss_forward.default": SliceRule(_find_passes, partial=_PARTIAL, indices=_INDICES),
    "aten.nll_loss2d_forward.default": SliceRule(_find_passes, partial=_PARTIAL, indices=_INDICES),
    "aten.nll_loss_backward.default": SliceRule(_find_passes_backward, indices=_INDICES),
    "aten.nll_loss2d_backward.default": SliceRule(_find_passes_backward, indices=_INDICES),
}
