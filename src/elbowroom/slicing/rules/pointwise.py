"""Pointwise ops: each element of a result depends on one element of each argument, which may be broadcast.

Those over lists of tensors (`_foreach_add_`) are cut if each list has one tensor.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from elbowroom.ir.slicing import SlicePass
from elbowroom.slicing.op_call import OpCall, is_over_lists
from elbowroom.slicing.rule import Alternatives, SliceRule, make_loop, make_pass

NAMES = """
    abs abs_ add add_ addcdiv addcdiv_ addcmul addcmul_ bitwise_and bitwise_not bitwise_or clamp clamp_ clamp_max
    clamp_min clamp_min_ clone copy copy_ cos div div_ elu elu_ elu_backward eq erf exp exp_ fill fill_ full_like ge
    gelu gelu_ gelu_backward gt hardsigmoid hardsigmoid_ hardsigmoid_backward hardswish hardswish_
    hardswish_backward hardtanh hardtanh_ hardtanh_backward isnan le leaky_relu leaky_relu_ leaky_relu_backward lerp
    lerp_ log log1p logical_and logical_not logical_or lt masked_fill masked_fill_ maximum maximum_ minimum minimum_
    mish mish_backward mul mul_ native_dropout_backward ne neg neg_ ones_like pow pow_ reciprocal relu relu_ rsqrt
    rsub sigmoid sigmoid_ sigmoid_backward sign silu silu_ silu_backward sin softplus softplus_backward sqrt square
    sub sub_ tanh tanh_ tanh_backward threshold threshold_ threshold_backward _to_copy where zero_ zeros_like
"""
"""ATen ops, without namespace or "_foreach_"; all overloads that return one tensor, or write to one."""

UNREAD_SELF = frozenset(("copy_", "fill_", "zero_", "full_like", "ones_like", "zeros_like"))
"""Ops that do not read their first argument: they write to it, or it has the shape of the result."""


def _find_passes(call: OpCall) -> Alternatives:
    """Cut along each dimension, that of the largest stride first."""
    if len(set(call.names)) < len(call.names):
        return ()  # a list of several tensors
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
    unread = {"self"} if call.op._opname.removeprefix("_foreach_") in UNREAD_SELF else ()
    return (make_pass(call, [loop], unread=unread),)


def _list_overloads() -> dict[str, SliceRule]:
    rule = SliceRule(_find_passes)
    found = {}
    for name in (prefix + name for name in NAMES.split() for prefix in ("", "_foreach_")):
        packet = getattr(torch.ops.aten, name, None)
        if packet is None:
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            if _is_ruled(op):
                found[str(op)] = rule
    return found


def _is_ruled(op: OpOverload) -> bool:
    arguments, returns = op._schema.arguments, [str(each.type) for each in op._schema.returns]
    if any(each.is_out for each in arguments):
        return False
    if not is_over_lists(op):
        return returns == ["Tensor"]
    has_tensor_of_numbers = any(each.name == "scalars" and str(each.type) == "Tensor" for each in arguments)
    return str(arguments[0].type) == "List[Tensor]" and returns in ([], ["List[Tensor]"]) and not has_tensor_of_numbers


RULES = _list_overloads()
