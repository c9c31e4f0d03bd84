"""Fused optimizer steps (`torch.optim.AdamW(..., fused=True)`) of one parameter.

Their kernels go through the memory of all tensors from the first element to the last. Those for CPUs compute vectors,
and what remains at the end element by element, so slices begin at vectors.
"""

from __future__ import annotations

import math

import torch

from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.random_data import count_elements
from elbowroom.slicing.rule import Alternatives, SliceRule, count_results, make_loop, make_pass

NAMES = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_")

NUMBERS = frozenset(("state_steps", "lr", "grad_scale", "found_inf"))
"""Arguments that may be tensors, of one element each."""

VECTOR_BYTES = 128
"""Bytes of the vectors that a kernel computes at a time, or a multiple of them."""


def _find_passes(call: OpCall) -> Alternatives:
    """Cut along the dimension of the largest stride, if all tensors have their elements in the same order."""
    if len(set(call.names)) < len(call.names):
        return ()  # several parameters
    tensors = [each for name, each in zip(call.names, call.reads, strict=True) if name not in NUMBERS]
    first = tensors[0]
    if any((each.shape, each.stride()) != (first.shape, first.stride()) for each in tensors):
        return ()
    if not first.ndim or not first.numel() or count_elements(first) != first.numel():
        return ()
    dimension = max(range(first.ndim), key=lambda each: (first.shape[each] > 1, first.stride(each)))
    length = first.shape[dimension]
    step = VECTOR_BYTES // min(each.element_size() for each in tensors)
    reads = {name: dimension for name in call.names if name not in NUMBERS}
    writes = dict.fromkeys(range(count_results(call)), dimension)
    loop = make_loop(call, length, reads, writes, multiple=step // math.gcd(step, first.numel() // length))
    return ((make_pass(call, [loop]),),)


RULES = {
    str(getattr(packet, overload)): SliceRule(_find_passes)
    for packet in (getattr(torch.ops.aten, name) for name in NAMES)
    for overload in packet.overloads()
    if "out" not in overload
}
