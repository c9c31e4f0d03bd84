"""Softmax and log_softmax: along every dimension but their own."""

from __future__ import annotations

from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import Alternatives, SliceRule, cut


def _find_passes(call: OpCall) -> Alternatives:
    some = call.reads[0]
    own = call["dim"] % max(some.ndim, 1)
    others = [each for each in range(some.ndim) if each != own]
    return tuple((cut(call, some.shape[each], dict.fromkeys(call.names, each), {0: each}),) for each in others)


_RULE = SliceRule(_find_passes)

RULES = {
    "aten._log_softmax.default": _RULE,
    "aten._log_softmax_backward_data.default": _RULE,
    "aten._softmax.default": _RULE,
    "aten._safe_softmax.default": _RULE,
    "aten._softmax_backward_data.default": _RULE,
}
