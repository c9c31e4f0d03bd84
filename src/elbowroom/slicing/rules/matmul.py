"""Products of matrices: along rows and columns of the product, or summed along the inner dimension."""

from __future__ import annotations

import functools

from elbowroom.ir.slicing import SlicePass
from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import Alternatives, SliceRule, cut, find_broadcast, list_blocks

BLOCK = 16
"""Rows and columns that kernels compute together. What is left over is added in another order, so slices of whole
blocks can be exact where equal ones are not."""


def _find_passes(call: OpCall, left: str, right: str, added: str = "") -> Alternatives:
    """Cut along each dimension of the product: batch, rows, columns.

    Args:
        added: name of a broadcast argument that is added to the product. An inner dimension is not cut then, since each
            slice would add it.
    """
    first, second = call[left], call[right]
    found: list[SlicePass] = []
    last = first.ndim
    for dimension in range(-last, 0):
        is_row, is_column = dimension == -2, dimension == -1
        length = second.shape[-1] if is_column else first.shape[dimension]
        reads = {} if is_column else {left: dimension}
        reads.update({} if is_row else {right: dimension})
        reads.update(find_broadcast(call, added, dimension, length) if added else {})
        found.append(cut(call, length, reads, {0: dimension + last}))
    found += list_blocks(found[-2:], BLOCK)
    if not added:
        found.append(cut(call, first.shape[-1], {left: -1, right: -2}, {}, sums=True))
    return tuple((each,) for each in found)


def _find_passes_linear(call: OpCall) -> Alternatives:
    some, weight = call["input"], call["weight"]
    if weight.ndim != 2:
        return ()
    found = [cut(call, some.shape[each], {"input": each}, {0: each}) for each in range(some.ndim - 1)]
    found.append(cut(call, weight.shape[0], {"weight": 0, "bias": 0}, {0: some.ndim - 1}))
    found += list_blocks(found, BLOCK)
    return tuple((each,) for each in found)


def _make_rule(left: str, right: str, added: str = "") -> SliceRule:
    return SliceRule(functools.partial(_find_passes, left=left, right=right, added=added))


RULES = {
    "aten.mm.default": _make_rule("self", "mat2"),
    "aten.bmm.default": _make_rule("self", "mat2"),
    "aten.addmm.default": _make_rule("mat1", "mat2", "self"),
    "aten.baddbmm.default": _make_rule("batch1", "batch2", "self"),
    "aten.linear.default": SliceRule(_find_passes_linear),
}
