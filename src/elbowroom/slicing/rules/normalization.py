"""Normalization: layer norm along rows, batch norm along channels, group norm along the batch and along groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import Alternatives, SliceRule, cut

INPUT = 0
"""Position of the gradient of the input among the results of a backward pass; those of weight and bias follow."""

_PARAMETERS = ("weight", "bias", "running_mean", "running_var")


def _find_dtypes(call: OpCall) -> dict[int, torch.dtype]:
    """Return the dtype of saved statistics if the input has less precision than a parameter, as under autocast."""
    given = [call.values.get(name) for name in _PARAMETERS]
    is_mixed = any(each is not None and each.dtype != call["input"].dtype for each in given)
    return {1: torch.float32, 2: torch.float32} if is_mixed else {}


def _combine(call: OpCall, of_input: dict[str, int], of_others: dict[str, int], sizes: tuple[int, int]) -> Alternatives:
    """Return the ways to cut a backward pass.

    Args:
        of_input: dimensions along which the gradient of the input is cut.
        of_others: dimensions along which those of weight and bias are cut.
        sizes: lengths of both loops.
    """
    mask = call.find_mask()
    others = [index for index, position in enumerate(mask) if position != INPUT]
    exact = []
    if INPUT in mask:
        exact.append(cut(call, sizes[0], of_input, {0: of_input["input"]}, results=[0]))
    if others:
        exact.append(cut(call, sizes[1], of_others, dict.fromkeys(others, 0), results=others, unread={"bias"}))
    if not others:
        return (tuple(exact),)
    writes = {0: of_input["input"]} if INPUT in mask else {}
    return (tuple(exact), (cut(call, sizes[0], of_input, writes, sums=True, unread={"bias"}),))


# -- layer norm -------------------------------------------------------------------------------------------------------


def _find_passes_layer(call: OpCall) -> Alternatives:
    some = call["input"]
    rows = range(some.ndim - len(call["normalized_shape"]))
    return tuple((cut(call, some.shape[each], {"input": each}, dict.fromkeys(range(3), each)),) for each in rows)


def _find_passes_layer_backward(call: OpCall) -> Alternatives:
    """Cut the gradient of the input along rows, those of weight and bias along the first normalized dimension."""
    some = call["input"]
    first = some.ndim - len(call["normalized_shape"])
    if not first:
        return ()
    rows = dict.fromkeys(("grad_out", "input", "mean", "rstd"), 0)
    features = {"grad_out": first, "input": first, "weight": 0, "bias": 0}
    return _combine(call, rows, features, (some.shape[0], some.shape[first]))


def _adapt_layer(call: OpCall, values: Mapping[str, Any]) -> dict[str, Any]:
    whole = call["normalized_shape"]
    return {"normalized_shape": list(values["input"].shape[-len(whole) :])}


# -- batch norm -------------------------------------------------------------------------------------------------------

_VECTORS = ("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd", "save_var")


def _find_passes_batch(call: OpCall) -> Alternatives:
    """Cut along channels, and along the batch if its statistics are given.

    In evaluation the op returns empty statistics, which no loop narrows.
    """
    some = call["input"]
    vectors = dict.fromkeys(_VECTORS, 0)
    if call.values.get("training", True):
        return ((cut(call, some.shape[1], {"input": 1, **vectors}, {0: 1, 1: 0, 2: 0}),),)
    channels = cut(call, some.shape[1], {"input": 1, **vectors}, {0: 1})
    return ((cut(call, some.shape[0], {"input": 0}, {0: 0}),), (channels,))


def _find_passes_batch_backward(call: OpCall) -> Alternatives:
    dimensions = {"grad_out": 1, "input": 1, **dict.fromkeys(_VECTORS, 0)}
    writes = {index: 1 if position == INPUT else 0 for index, position in enumerate(call.find_mask())}
    if call["save_mean"] is not None and not call["save_mean"].numel():
        dimensions.pop("save_mean")
        dimensions.pop("save_invstd")
    unread = {"running_mean", "running_var"} if call["train"] else ()
    return ((cut(call, call["input"].shape[1], dimensions, writes, unread=unread),),)


# -- group norm -------------------------------------------------------------------------------------------------------


def _find_passes_group(call: OpCall) -> Alternatives:
    batch = cut(call, call["N"], {"input": 0}, dict.fromkeys(range(3), 0))
    dimensions = {"input": 1, "weight": 0, "bias": 0}
    return ((batch,), (cut(call, call["group"], dimensions, dict.fromkeys(range(3), 1)),))


def _find_passes_group_backward(call: OpCall) -> Alternatives:
    """Cut along groups, or each gradient by itself.

    PyTorch's kernel for channels_last writes to the gradient of the input even where the mask leaves it out, so the
    gradients are not separated there.
    """
    names = ("grad_out", "input", "mean", "rstd")
    batch, groups = dict.fromkeys(names, 0), {**dict.fromkeys(names, 1), "weight": 0}
    writes = {index: 1 if position == INPUT else 0 for index, position in enumerate(call.find_mask())}
    together = (cut(call, call["group"], groups, writes),)
    separate, *sums = _combine(call, batch, groups, (call["N"], call["group"]))
    if len(separate) == 1 or not call["input"].is_contiguous():
        return (together, *sums)
    return (separate, together, *sums)


def _adapt_group(call: OpCall, values: Mapping[str, Any]) -> dict[str, Any]:
    batch, channels = values["input"].shape[:2]
    return {"N": batch, "C": channels, "group": call["group"] * channels // call["C"]}


def _find_dtypes_group_backward(call: OpCall) -> dict[int, torch.dtype]:
    return {INPUT: call["input"].dtype}


_BATCH = SliceRule(_find_passes_batch, dtypes=_find_dtypes)

RULES = {
    "aten.native_layer_norm.default": SliceRule(_find_passes_layer, _adapt_layer, dtypes=_find_dtypes),
    "aten.native_layer_norm_backward.default": SliceRule(_find_passes_layer_backward, _adapt_layer),
    "aten.native_batch_norm.default": _BATCH,
    "aten._native_batch_norm_legit.default": _BATCH,
    "aten._native_batch_norm_legit.no_stats": _BATCH,
    "aten.native_batch_norm_backward.default": SliceRule(_find_passes_batch_backward),
    "aten.native_group_norm.default": SliceRule(_find_passes_group, _adapt_group, dtypes=_find_dtypes),
    "aten.native_group_norm_backward.default": SliceRule(
        _find_passes_group_backward, _adapt_group, dtypes=_find_dtypes_group_backward
    ),
}
