"""Convolution and its backward pass, transposed and grouped ones included."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from elbowroom.ir.slicing import Loop, SlicePass
from elbowroom.slicing.op_call import OpCall
from elbowroom.slicing.rule import Alternatives, SliceRule, make_loop, make_pass

INPUT = 0
WEIGHT = 1
BIAS = 2
"""Positions of the gradients that `convolution_backward` returns."""


def _find_passes(call: OpCall) -> Alternatives:
    if call["input"].ndim != call["weight"].ndim:
        return ()
    batch = make_loop(call, call["input"].shape[0], {"input": 0}, {0: 0})
    if call["groups"] > 1:
        vectors = {"weight": 0, "bias": 0, "input": 1}
        channels = make_loop(call, call["groups"], vectors, {0: 1})
    else:
        of_weight = 1 if call["transposed"] else 0
        channels = make_loop(call, call["weight"].shape[of_weight], {"weight": of_weight, "bias": 0}, {0: 1})
    return ((make_pass(call, [batch]),), (make_pass(call, [channels]),))


def _find_passes_backward(call: OpCall) -> Alternatives:
    if call["input"].ndim != call["weight"].ndim:
        return ()
    mask = call.find_mask()
    index_of = {position: index for index, position in enumerate(mask)}
    exact: list[tuple[SlicePass, ...]] = [()]
    if INPUT in index_of:
        exact = [(each,) for each in _cut_grad_input(call, index_of[INPUT])]
    if WEIGHT in index_of or BIAS in index_of:
        exact = [(*first, *rest) for first, rest in itertools.product(exact, _cut_grad_parameters(call, index_of))]
    return (*exact, (_sum_over_batch(call, index_of),))


def _cut_grad_input(call: OpCall, index: int) -> list[SlicePass]:
    batch = make_loop(call, call["input"].shape[0], {"grad_output": 0, "input": 0}, {index: 0})
    if call["groups"] > 1:
        dimensions = {"grad_output": 1, "input": 1, "weight": 0}
        channels = make_loop(call, call["groups"], dimensions, {index: 1})
    else:
        dimensions = {"input": 1, "weight": 0 if call["transposed"] else 1}
        channels = make_loop(call, call["input"].shape[1], dimensions, {index: 1})
    return [make_pass(call, [loop], unread={"input"}, results=[index]) for loop in (batch, channels)]


def _cut_grad_parameters(call: OpCall, index_of: dict[int, int]) -> list[tuple[SlicePass, ...]]:
    """Return the ways to cut the gradients of weight and bias along channels.

    The kernel of some backends computes both together, so they are computed together if possible.
    """
    of_weight, of_bias = index_of.get(WEIGHT), index_of.get(BIAS)
    together = [index for index in (of_weight, of_bias) if index is not None]
    outputs, inputs = _loop_over_outputs(call, index_of), _loop_over_inputs(call, index_of)
    if of_weight is None:
        return [(_compute(call, loops, together),) for loops in ([outputs], [])]
    blocks = [outputs] if inputs is None else [outputs, inputs]
    found: list[tuple[SlicePass, ...]] = [(_compute(call, blocks, together),)]
    if inputs is not None:
        found.append((_compute(call, [outputs], together),))
    if of_bias is not None:
        bias = _compute(call, [], [of_bias])
        found += [(_compute(call, loops, [of_weight]), bias) for loops in dict.fromkeys((tuple(blocks), (outputs,)))]
    return found


def _compute(call: OpCall, loops: Any, results: list[int]) -> SlicePass:
    return make_pass(call, loops, unread={"weight"}, results=results)


def _loop_over_outputs(call: OpCall, index_of: dict[int, int]) -> Loop:
    """Return the loop over output channels, or over groups."""
    dimension = 1 if call["transposed"] and call["groups"] == 1 else 0
    reads = {"grad_output": 1, "weight": dimension}
    length = call["grad_output"].shape[1]
    if call["groups"] > 1:
        reads["input"] = 1
        length = call["groups"]
    return make_loop(call, length, reads, _select(index_of, {WEIGHT: dimension, BIAS: 0}))


def _loop_over_inputs(call: OpCall, index_of: dict[int, int]) -> Loop | None:
    if call["groups"] > 1:
        return None
    dimension = 0 if call["transposed"] else 1
    reads = {"input": 1, "weight": dimension}
    return make_loop(call, call["input"].shape[1], reads, _select(index_of, {WEIGHT: dimension}))


def _sum_over_batch(call: OpCall, index_of: dict[int, int]) -> SlicePass:
    reads = {"grad_output": 0, "input": 0}
    loop = make_loop(call, call["input"].shape[0], reads, _select(index_of, {INPUT: 0}))
    return make_pass(call, [loop], sums=True)


def _select(index_of: dict[int, int], dimensions: dict[int, int]) -> dict[int, int]:
    return {index_of[position]: dimension for position, dimension in dimensions.items() if position in index_of}


def _adapt(call: OpCall, values: Mapping[str, Any]) -> dict[str, Any]:
    whole, part = call["weight"].shape[0], values["weight"].shape[0]
    adapted: dict[str, Any] = {"groups": call["groups"] * part // whole if call["groups"] > 1 else 1}
    if call.values.get("bias_sizes") is not None:
        adapted["bias_sizes"] = [values["grad_output"].shape[1]]
    return adapted


RULES = {
    "aten.convolution.default": SliceRule(_find_passes, _adapt),
    "aten.convolution_backward.default": SliceRule(_find_passes_backward, _adapt),
}
