"""Turns of the blocks of a model under `fully_shard`: when the weights of each are gathered.

    forward pass            | backward pass
    block 1 | block 2 | ... | block 2 | block 1 |        one turn a pass; the root from its first op to the update

Replays may read a block's weights during its turns only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from elbowroom.ir.plan import Choice, Plan
from elbowroom.ir.sliced_trace import slice_trace
from elbowroom.ir.trace import STATE_ROLES, Op, Presence, Role, Trace, View
from elbowroom.simulator.ranks.blocks import ROOT, find_block


class Gradient(NamedTuple):
    """A gradient that the backward pass makes: `ready` is the tick after the last op that adds to it."""

    ready: int
    storage: int


class Turn(NamedTuple):
    """Ticks (begin, end) during which a block's weights are used in one pass."""

    begin: int
    end: int
    block: str


def list_gradients(trace: Trace) -> tuple[Gradient, ...]:
    """Return the gradients that ops of the backward pass add to, in the order in which they are ready."""
    found: dict[int, int] = {}
    for op in trace.ops:
        if op.tick >= trace.needs[0].tick:
            for view in op.writes:
                if trace.storages[view.storage].role is Role.GRADIENT and _adds(trace, op, view):
                    found[view.storage] = op.tick + 1
    return tuple(sorted(Gradient(ready, storage) for storage, ready in found.items()))


def list_weights(trace: Trace) -> dict[str, list[int]]:
    """Return the parameters of each block."""
    found: dict[str, list[int]] = {}
    for home in trace.storages:
        if home.role is Role.PARAMETER:
            found.setdefault(find_block(home.module), []).append(home.id)
    return found


def list_turns(trace: Trace, *, reshard_after_forward: bool) -> tuple[Turn, ...]:
    """Return the turns for which blocks are gathered, in order. The trace has a backward pass that makes gradients.

    A turn of the backward pass begins with what the block's first op there needs.
    """
    weights, gradients = list_weights(trace), list_gradients(trace)
    update, backward = gradients[-1].ready, trace.needs[0].tick
    owner = {storage: block for block, owned in weights.items() for storage in owned}
    owner |= {each.storage: find_block(trace.storages[each.storage].module) for each in gradients}
    ticks: dict[tuple[str, bool], list[int]] = {}
    last = -1
    for op in trace.ops:
        if op.tick >= update:
            break
        blocks = {owner[storage] for storage in list_touched(op) if storage in owner}
        if op.tick >= backward and (block := find_block(op.module)) != ROOT:
            blocks.add(block)
        for block in blocks:
            first = max(last + 1, backward) if op.tick >= backward else op.tick
            ticks.setdefault((block, op.tick >= backward), [first]).append(op.tick)
        last = op.tick
    turns: list[Turn] = []
    for block in weights:
        before, after = ticks.get((block, False), []), ticks.get((block, True), [])
        if block == ROOT or not reshard_after_forward:
            used = [*before, *after]
            turns += [Turn(min(used), update if block == ROOT else max(used) + 1, block)] if used else []
        else:
            turns += [Turn(min(used), max(used) + 1, block) for used in (before, after) if used]
    return tuple(sorted(turns))


def gather_in_turns(trace: Trace, *, reshard_after_forward: bool = True) -> Trace:
    """Return the same step, in which weights are there for the turns of their blocks only.

    So plans replay ops that read weights as those of rooms under `fully_shard` do. A trace without a backward pass that
    makes gradients is returned as it is.
    """
    if not trace.needs or not list_gradients(trace):
        return trace
    weights = list_weights(trace)
    turns = list_turns(trace, reshard_after_forward=reshard_after_forward)
    presences = tuple(
        Presence(storage=weight, begin=turn.begin, end=turn.end) for turn in turns for weight in weights[turn.block]
    )
    return dataclasses.replace(trace, presences=(*trace.presences, *presences))


def replays_freed_weights(trace: Trace, plan: Plan, *, reshard_after_forward: bool) -> bool:
    """Tell whether a plan replays ops that read weights when `fully_shard` has freed them.

    A room under `fully_shard` does not follow such a plan; a forecast of it takes the weights to be there.
    """
    if plan.cuts:
        trace = slice_trace(trace, plan.cuts).trace
    gathered = gather_in_turns(trace, reshard_after_forward=reshard_after_forward)
    runs = _find_replays(trace, plan)
    return any(
        trace.storages[leaf].role is Role.PARAMETER and not gathered.has_contents(leaf, runs[index])
        for index, segment in enumerate(plan.segments)
        for leaf in segment.leaves
    )


def _find_replays(trace: Trace, plan: Plan) -> Mapping[int, int]:
    """Return the need at which each segment is replayed."""
    found: dict[int, int] = {}
    for decision in plan.decisions:
        if decision.choice is Choice.RECOMPUTE:
            closes = trace.gaps[decision.storage][decision.gap].closes
            found[decision.segment] = min(closes, found.get(decision.segment, closes))
    return found


def _adds(trace: Trace, op: Op, target: View) -> bool:
    """Return True if an op makes a gradient, or adds something of its shape to it that is not the model's state.

    So the scaling of a gradient, as after a norm of all of them, is part of the update.
    """
    if trace.storages[target.storage].created == op.tick:
        return True
    others = (view for view in op.reads if trace.storages[view.storage].role not in STATE_ROLES)
    return any(view.shape == target.shape for view in others)


def list_touched(op: Op) -> set[int]:
    """Return the storages that an op reads or writes."""
    return {view.storage for view in (*op.reads, *op.writes)}
