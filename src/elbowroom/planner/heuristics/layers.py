"""Finds the layers of a net in a trace, for strategies that reason about layers.

A layer is an op of the forward pass for which autograd saves a tensor: one of its reads just before it, or one of its
reads or results just after it, with no other op in between; if both neighbours qualify, the earlier op. Ops without
saves (views, sums, counters) belong to no layer.

    save x  save w  [convolution]   op   save y  [batch norm]  save m  [relu]  save z  save z  [pooling]
    '------- its reads --------'        '-- its read   its result --'    result ^       ^ read
"""

from __future__ import annotations

import bisect
import dataclasses

from elbowroom.ir.trace import Op, Trace, View


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer.

    Attributes:
        tick: of its op in the forward pass.
        is_convolution: by its op's name.
        is_costly: whether its op is a matrix product or a convolution: an op with flops.
        inputs: storages that its op reads and does not change.
        saved: storages saved for it.
        backward: the tick of the first need of its saves, at which its backward pass begins; -1 if there is none.
    """

    tick: int
    is_convolution: bool
    is_costly: bool
    inputs: tuple[int, ...]
    saved: tuple[int, ...]
    backward: int


def find_layers(trace: Trace) -> tuple[Layer, ...]:
    """Return the layers of the forward pass, which ends with the first need, in order."""
    end = trace.needs[0].tick if trace.needs else trace.end
    first_need: dict[int, int] = {}
    for need in trace.needs:
        first_need.setdefault(need.save, need.tick)
    ops = [op for op in trace.ops if op.tick < end]
    owned = _assign(ops, [index for index, save in enumerate(trace.saves) if save.tick < end], trace)
    return tuple(
        Layer(
            tick=op.tick,
            is_convolution="convolution" in op.name,
            is_costly=op.flops > 0 or "convolution" in op.name,
            inputs=tuple(sorted({view.storage for view in op.reads} - {view.storage for view in op.writes})),
            saved=tuple(sorted({trace.saves[index].storage for index in owned[op.tick]})),
            backward=min((first_need[index] for index in owned[op.tick] if index in first_need), default=-1),
        )
        for op in ops
        if op.tick in owned
    )


def _assign(ops: list[Op], saves: list[int], trace: Trace) -> dict[int, list[int]]:
    """Return, by tick of the op, the indices of the saves that were made for it."""
    ticks = [op.tick for op in ops]
    between: dict[tuple[int, int], list[int]] = {}  # (position among the ops, storage)
    for index in saves:
        save = trace.saves[index]
        between.setdefault((bisect.bisect(ticks, save.tick), save.storage), []).append(index)
    owned: dict[int, list[int]] = {}
    for (position, storage), indices in between.items():
        before, after = ops[max(position - 1, 0)], ops[min(position, len(ops) - 1)]
        is_before = before.tick < trace.saves[indices[0]].tick and _has((*before.reads, *before.writes), storage)
        is_after = after.tick > trace.saves[indices[0]].tick and _has(after.reads, storage)
        if is_before and is_after and len(indices) > 1:
            owned.setdefault(before.tick, []).append(indices.pop(0))  # one save for each of the two
        if is_after:
            owned.setdefault(after.tick, []).extend(indices)
        elif is_before:
            owned.setdefault(before.tick, []).extend(indices)
    return owned


def _has(views: tuple[View, ...], storage: int) -> bool:
    return any(view.storage == storage for view in views)
