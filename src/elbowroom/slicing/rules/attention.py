"""Attention: along the batch, along heads, and along queries if no causal mask depends on their positions."""

from __future__ import annotations

import math

import torch

from elbowroom.ir.slicing import SlicePass
from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import Alternatives, SliceRule, cut, find_broadcast

_GIVEN = ("query", "key", "value")
_BACKWARD = ("grad_out", "out", "logsumexp")


def _find_passes(call: OpCall) -> Alternatives:
    """Cut the forward pass, whose results are the output and `logsumexp`, both of shape [batch, heads, queries]."""
    if call["dropout_p"] != 0.0:
        return ()
    found = [_cut_along(call, 0, _GIVEN, {0: 0, 1: 0}), _cut_along(call, 1, _GIVEN, {0: 1, 1: 1})]
    if not call["is_causal"]:
        queries = call["query"].shape[2]
        found.append(cut(call, queries, {"query": 2, **find_broadcast(call, "attn_mask", -2, queries)}, {0: 2, 1: 2}))
    return tuple((each,) for each in found)


def _find_dtypes(call: OpCall) -> dict[int, torch.dtype]:
    """Return the dtype of `logsumexp`, which PyTorch 2.11 describes as float32 for float64, too."""
    return {1: torch.float64 if call["query"].dtype == torch.float64 else torch.float32}


def _find_passes_backward(call: OpCall) -> Alternatives:
    if call["dropout_p"] != 0.0:
        return ()
    found = (_cut_along(call, each, (*_GIVEN, *_BACKWARD), {0: each, 1: each, 2: each}) for each in (0, 1))
    return tuple((each,) for each in found)


def _cut_along(call: OpCall, dimension: int, names: tuple[str, ...], writes: dict[int, int]) -> SlicePass:
    """Cut along the batch or along heads. Several heads of queries may share one of keys."""
    length = math.gcd(*(call[name].shape[dimension] for name in _GIVEN))
    mask = find_broadcast(call, "attn_mask", dimension - 4, call["query"].shape[dimension])
    return cut(call, length, {**dict.fromkeys(names, dimension), **mask}, writes)


RULES = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": SliceRule(_find_passes, dtypes=_find_dtypes),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": SliceRule(_find_passes_backward),
}
