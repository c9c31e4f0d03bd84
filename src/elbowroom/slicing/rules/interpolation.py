"""Interpolation and padding: each channel of each image by itself."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import Alternatives, SliceRule, cut

KINDS = {
    "upsample_nearest1d": 1,
    "upsample_linear1d": 1,
    "upsample_nearest2d": 2,
    "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2,
    "upsample_nearest3d": 3,
    "upsample_trilinear3d": 3,
    "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 2,
    "_upsample_nearest_exact3d": 3,
    "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2,
}
"""Number of spatial dimensions of each op."""

PADDING = {"reflection_pad1d": 1, "reflection_pad2d": 2, "replication_pad1d": 1, "replication_pad2d": 2}


def _find_passes(call: OpCall, spatial: int, unread: frozenset[str] = frozenset()) -> Alternatives:
    some = call.reads[0]
    return tuple(
        (cut(call, some.shape[each], dict.fromkeys(call.names, each), {0: each}, unread=unread),)
        for each in range(some.ndim - spatial)
    )


def _adapt(call: OpCall, values: Mapping[str, Any]) -> dict[str, Any]:
    return {"input_size": [*values["grad_output"].shape[:2], *call["input_size"][2:]]}


def _find_passes_constant(call: OpCall) -> Alternatives:
    """Cut along the dimensions that are not padded. `pad` begins with the last dimension."""
    some = call["self"]
    padded = [any(call["pad"][2 * index : 2 * index + 2]) for index in range(some.ndim)][::-1]
    others = [each for each in range(some.ndim) if not padded[each]]
    return tuple((cut(call, some.shape[each], {"self": each}, {0: each}),) for each in others)


def _list_rules() -> dict[str, SliceRule]:
    found = {"aten.constant_pad_nd.default": SliceRule(_find_passes_constant)}
    for name, spatial in KINDS.items():
        find = functools.partial(_find_passes, spatial=spatial)
        found[f"aten.{name}.default"] = SliceRule(find)
        found[f"aten.{name}.vec"] = SliceRule(find)
        found[f"aten.{name}_backward.default"] = SliceRule(find, _adapt)
    for name, spatial in PADDING.items():
        find = functools.partial(_find_passes, spatial=spatial)
        found[f"aten.{name}.default"] = SliceRule(find)
        without_self = functools.partial(_find_passes, spatial=spatial, unread=frozenset({"self"}))
        found[f"aten.{name}_backward.default"] = SliceRule(without_self)
    return found


RULES = _list_rules()
