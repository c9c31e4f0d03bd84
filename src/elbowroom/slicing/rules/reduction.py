"""Reductions: along the dimensions that remain."""

from __future__ import annotations

import functools
import math

from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import VECTOR_BYTES, Alternatives, SliceRule, count_results, cut, list_blocks


def _find_passes(call: OpCall, *, sums: bool) -> Alternatives:
    """Cut along each dimension that is not reduced.

    Kernels compute rows that lie beside each other in whole vectors, and what remains at their end in another order.
    Slices of whole vectors have the same end.

    Args:
        sums: the op is a sum, so it may also be cut along reduced dimensions.
    """
    some = call.reads[0]
    given = call.values.get("dim")
    dimensions = [given] if isinstance(given, int) else given or range(some.ndim)
    reduced = {each % some.ndim for each in dimensions} if some.ndim else set()
    is_kept = bool(call.values.get("keepdim"))
    exact, summed = [], []
    for each in range(some.ndim):
        if each in reduced:
            summed.append((cut(call, some.shape[each], {call.names[0]: each}, {}, sums=True),))
            continue
        result = each if is_kept else sum(other not in reduced for other in range(each))
        writes = dict.fromkeys(range(count_results(call)), result)
        found = cut(call, some.shape[each], {call.names[0]: each}, writes)
        exact.append((found,))
        if not reduced.intersection(range(each + 1, some.ndim)):
            row_bytes = some.element_size() * math.prod(some.shape[each + 1 :])
            vectors = VECTOR_BYTES // math.gcd(VECTOR_BYTES, row_bytes)
            exact += [(blocks,) for blocks in list_blocks([found], vectors) if vectors > 1]
    return (*exact, *summed) if sums else tuple(exact)


_RULE = SliceRule(functools.partial(_find_passes, sums=False))

RULES = {
    **dict.fromkeys(
        ("aten.sum.default", "aten.sum.dim_IntList"), SliceRule(functools.partial(_find_passes, sums=True))
    ),
    **dict.fromkeys(("aten.mean.dim", "aten.amax.default", "aten.amin.default", "aten.max.dim", "aten.min.dim"), _RULE),
    **dict.fromkeys(("aten.logsumexp.default", "aten.argmax.default", "aten.linalg_vector_norm.default"), _RULE),
    **dict.fromkeys(("aten.var_mean.correction", "aten.var.correction", "aten.std.correction"), _RULE),
}
