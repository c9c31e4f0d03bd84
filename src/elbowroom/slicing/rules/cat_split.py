"""Concatenation, stacking, and gradients of slices: along every dimension but their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elbowroom.ir.slicing import Loop, SlicePass
from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import Alternatives, SliceRule, cut, make_pass


def _find_passes_cat(call: OpCall) -> Alternatives:
    some = max(call.reads, key=lambda each: each.ndim)
    own = call["dim"] % max(some.ndim, 1)
    others = [each for each in range(some.ndim) if each != own]
    return tuple((_cut_cat(call, some.shape[each], each),) for each in others)


def _cut_cat(call: OpCall, length: int, dimension: int) -> SlicePass:
    """Cut along a dimension. The op skips empty tensors of one dimension, so they are read whole."""
    reads = tuple(None if each.shape == (0,) else dimension for each in call.reads)
    loop = Loop(length=length, multiple=1, reads=reads, writes=(dimension,))
    return make_pass(call, [loop])


def _find_passes_stack(call: OpCall) -> Alternatives:
    """Cut along the tensors' dimensions. The result has one more, that of the stack."""
    first = call.reads[0]
    own = call["dim"] % (first.ndim + 1)
    found = []
    for each in range(first.ndim):
        reads = (each,) * len(call.reads)
        loop = Loop(length=first.shape[each], multiple=1, reads=reads, writes=(each + (each >= own),))
        found.append((make_pass(call, [loop]),))
    return tuple(found)


def _find_passes_slice_backward(call: OpCall) -> Alternatives:
    grad = call["grad_output"]
    own = call["dim"] % max(grad.ndim, 1)
    others = [each for each in range(grad.ndim) if each != own]
    return tuple((cut(call, grad.shape[each], {"grad_output": each}, {0: each}),) for each in others)


def _adapt_slice_backward(call: OpCall, values: Mapping[str, Any]) -> dict[str, Any]:
    sizes = list(values["grad_output"].shape)
    own = call["dim"] % len(sizes)
    sizes[own] = call["input_sizes"][own]
    return {"input_sizes": sizes}


def _find_passes_select_backward(call: OpCall) -> Alternatives:
    """Cut along the gradient's dimensions. The result has one more, that of the selection."""
    grad = call["grad_output"]
    own = call["dim"] % (grad.ndim + 1)
    return tuple(
        (cut(call, grad.shape[each], {"grad_output": each}, {0: each + (each >= own)}),) for each in range(grad.ndim)
    )


def _adapt_select_backward(call: OpCall, values: Mapping[str, Any]) -> dict[str, Any]:
    sizes = list(values["grad_output"].shape)
    own = call["dim"] % (len(sizes) + 1)
    sizes.insert(own, call["input_sizes"][own])
    return {"input_sizes": sizes}


RULES = {
    "aten.cat.default": SliceRule(_find_passes_cat),
    "aten.stack.default": SliceRule(_find_passes_stack),
    "aten.slice_backward.default": SliceRule(_find_passes_slice_backward, _adapt_slice_backward),
    "aten.select_backward.default": SliceRule(_find_passes_select_backward, _adapt_select_backward),
}
