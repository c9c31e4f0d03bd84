"""Pooling: each channel of each image by itself."""

from __future__ import annotations

import functools
import math

from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import Alternatives, SliceRule, count_results, make_loop, make_pass


def _find_passes(call: OpCall, spatial: int, unread: frozenset[str]) -> Alternatives:
    """Cut along the batch or along channels.

    Args:
        spatial: number of dimensions over which the op pools. Only channels precede them if there is no batch.
    """
    some = call.reads[0]
    found = []
    for dimension in range(some.ndim - spatial):
        reads = dict.fromkeys(call.names, dimension)
        writes = dict.fromkeys(range(count_results(call)), dimension)
        loop = make_loop(call, some.shape[dimension], reads, writes)
        found.append((make_pass(call, [loop], unread=unread),))
    return tuple(found)


def _make_rule(spatial: int, *unread: str) -> SliceRule:
    find = functools.partial(_find_passes, spatial=spatial, unread=frozenset(unread))
    return SliceRule(find, indices={"indices": lambda call: math.prod(call["self"].shape[-spatial:])})


RULES = {
    "aten.max_pool2d_with_indices.default": _make_rule(2),
    "aten.max_pool2d_with_indices_backward.default": _make_rule(2, "self"),
    "aten.max_pool3d_with_indices.default": _make_rule(3),
    "aten.max_pool3d_with_indices_backward.default": _make_rule(3, "self"),
    "aten.avg_pool2d.default": _make_rule(2),
    "aten.avg_pool2d_backward.default": _make_rule(2, "self"),
    "aten.avg_pool3d.default": _make_rule(3),
    "aten.avg_pool3d_backward.default": _make_rule(3, "self"),
    "aten.adaptive_max_pool2d.default": _make_rule(2),
    "aten.adaptive_max_pool2d_backward.default": _make_rule(2, "self"),
    "aten._adaptive_avg_pool2d.default": _make_rule(2),
    "aten._adaptive_avg_pool2d_backward.default": _make_rule(2, "self"),
    "aten._adaptive_avg_pool3d.default": _make_rule(3),
    "aten._adaptive_avg_pool3d_backward.default": _make_rule(3, "self"),
}
