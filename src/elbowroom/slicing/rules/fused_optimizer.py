"""Fused optimizer steps (`torch.optim.AdamW(..., fused=True)`) of one parameter.

Their kernels go through the memory of all tensors from the first element to the last, whatever their dimensions are, so
views of one dimension are cut. Kernels for CPUs compute vectors, and what remains at the end element by element, so
slices begin at vectors.
"""

from __future__ import annotations

import dataclasses

import torch

from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.random_data import count_elements
from elbowroom.slicing.rule import VECTOR_BYTES, Alternatives, SliceRule, count_results, make_loop, make_pass

NAMES = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_")

NUMBERS = frozenset(("state_steps", "lr", "grad_scale", "found_inf"))
"""Arguments that may be tensors, of one element each."""


def _list_tensors(call: OpCall) -> list[torch.Tensor]:
    return [each for name, each in zip(call.names, call.reads, strict=True) if name not in NUMBERS]


def _flatten(call: OpCall) -> OpCall:
    """Return the step on views of one dimension, if all tensors have their elements in the same order, without gaps."""
    first, *others = _list_tensors(call)
    if any((each.shape, each.stride()) != (first.shape, first.stride()) for each in others):
        return call
    if count_elements(first) != first.numel():
        return call
    pairs = zip(call.names, call.reads, strict=True)
    reads = [each if name in NUMBERS else torch.as_strided(each, (each.numel(),), (1,)) for name, each in pairs]
    return dataclasses.replace(call, values=call.replace_reads(reads, {}), reads=tuple(reads))


def _find_passes(call: OpCall) -> Alternatives:
    tensors = _list_tensors(call)
    if len(set(call.names)) < len(call.names) or any(each.ndim != 1 or each.stride() != (1,) for each in tensors):
        return ()  # several parameters, or not flat
    reads = {name: 0 for name in call.names if name not in NUMBERS}
    writes = dict.fromkeys(range(count_results(call)), 0)
    vector = VECTOR_BYTES // min(each.element_size() for each in tensors)
    return ((make_pass(call, [make_loop(call, tensors[0].numel(), reads, writes, multiple=vector)]),),)


RULES = {
    str(getattr(packet, overload)): SliceRule(_find_passes, view=_flatten)
    for packet in (getattr(torch.ops.aten, name) for name in NAMES)
    for overload in packet.overloads()
    if "out" not in overload
}
