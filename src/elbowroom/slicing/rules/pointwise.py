"""Pointwise ops: each element of a result depends on one element of each argument, which may be broadcast."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from elbowroom.ir.slicing import SlicePass
from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import Alternatives, SliceRule, make_loop, make_pass

NAMES = """
    abs abs_ add add_ addcdiv addcdiv_ addcmul addcmul_ bitwise_and bitwise_not bitwise_or clamp clamp_ clamp_max
    clamp_min clamp_min_ clone copy copy_ cos div div_ elu elu_ elu_backward eq erf exp exp_ fill fill_ ge gelu gelu_
    gelu_backward gt hardsigmoid hardsigmoid_ hardsigmoid_backward hardswish hardswish_ hardswish_backward
    hardtanh hardtanh_ hardtanh_backward isnan le leaky_relu leaky_relu_ leaky_relu_backward lerp lerp_ log log1p
    logical_and logical_not logical_or lt masked_fill masked_fill_ maximum minimum mish
    mish_backward mul mul_ native_dropout_backward ne neg neg_ pow pow_ reciprocal relu relu_ rsqrt rsub sigmoid
    sigmoid_ sigmoid_backward sign silu silu_ silu_backward sin softplus softplus_backward sqrt square sub sub_ tanh
    tanh_ tanh_backward threshold threshold_ threshold_backward _to_copy where zero_
"""
"""ATen ops, without namespace; all overloads that return one tensor."""

WRITE_ONLY = frozenset(("copy_", "fill_", "zero_"))
"""Ops that do not read the argument that they write to."""


def _find_passes(call: OpCall) -> Alternatives:
    """Cut along each dimension, that of the largest stride first."""
    shape = torch.broadcast_shapes(*(each.shape for each in call.reads))
    if any(each.ndim == 0 and each.is_floating_point() for each in call.reads) and not any(
        each.ndim and each.is_floating_point() for each in call.reads
    ):
        return ()  # the result's dtype depends on whether the scalar was a Python number
    first = max(call.reads, key=lambda each: each.numel())
    order = sorted(range(len(shape)), key=lambda each: (shape[each] <= 1, -_find_stride(first, each - len(shape))))
    return tuple(_cut(call, dimension - len(shape), shape) for dimension in order)


def _find_stride(tensor: torch.Tensor, dimension: int) -> int:
    return tensor.stride(dimension) if -dimension <= tensor.ndim else 0


def _cut(call: OpCall, dimension: int, shape: torch.Size) -> tuple[SlicePass, ...]:
    length = shape[dimension]
    reads = {
        name: dimension
        for name, each in zip(call.names, call.reads, strict=True)
        if -dimension <= each.ndim and each.shape[dimension] == length
    }
    loop = make_loop(call, length, reads, {0: dimension + len(shape)})
    unread = {"self"} if call.op._opname in WRITE_ONLY else ()
    return (make_pass(call, [loop], unread=unread),)


def _list_overloads() -> dict[str, SliceRule]:
    rule = SliceRule(_find_passes)
    found = {}
    for name in NAMES.split():
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if _is_ruled(op):
                found[str(op)] = rule
    return found


def _is_ruled(op: OpOverload) -> bool:
    returns = op._schema.returns
    is_out = any(each.is_out for each in op._schema.arguments)
    return len(returns) == 1 and str(returns[0].type) == "Tensor" and not is_out


RULES = _list_overloads()
