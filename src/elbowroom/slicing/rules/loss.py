"""Losses of class indices: along the batch."""

from __future__ import annotations

from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import Alternatives, SliceRule, cut

NONE = 0
MEAN = 1
SUM = 2
"""Values of `reduction`."""


def _find_passes(call: OpCall) -> Alternatives:
    """Cut the forward pass.

    A mean is not cut: only the whole batch gives the number by which it divides.
    """
    some, target = call["self"], call["target"]
    if some.ndim != target.ndim + 1 or call["reduction"] == MEAN:
        return ()
    reads = {"self": 0, "target": 0}
    if call["reduction"] == SUM:
        return ((cut(call, some.shape[0], reads, {}, sums=True),),)
    return ((cut(call, some.shape[0], reads, {0: 0}),),)


def _find_passes_backward(call: OpCall) -> Alternatives:
    some, target = call["self"], call["target"]
    if some.ndim != target.ndim + 1:
        return ()
    reads = {"self": 0, "target": 0}
    if call["reduction"] == NONE:
        reads["grad_output"] = 0
    return ((cut(call, some.shape[0], reads, {0: 0}, unread={"self"}),),)


_INDICES = {"target": lambda call: call["self"].shape[1]}

RULES = {
    "aten.nll_loss_forward.default": SliceRule(_find_passes, indices=_INDICES),
    "aten.nll_loss2d_forward.default": SliceRule(_find_passes, indices=_INDICES),
    "aten.nll_loss_backward.default": SliceRule(_find_passes_backward, indices=_INDICES),
    "aten.nll_loss2d_backward.default": SliceRule(_find_passes_backward, indices=_INDICES),
}
