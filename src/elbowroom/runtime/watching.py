"""Settings of the extension at the beginning of a step: which ops it records, and which events it reports."""

from __future__ import annotations

from typing import Any

from elbowroom.hooks.announced_rises import announce_rises
from elbowroom.residency.plan_policy import NEVER
from elbowroom.runtime.observer import Observer
from elbowroom.runtime.phase import Phase
from elbowroom.runtime.state_moves import StateMoves
from elbowroom.runtime.step_environment import StepEnvironment
from elbowroom.runtime.step_moves import StepMoves
from elbowroom.runtime.step_state import StepState

RESTING = 0.25
"""Share of the budget. While no more is live no op is recorded, in a room that never had too little room. If a step has
too little after all, what it made until then can be offloaded but not computed again."""


def start_watching(
    state: StepState,
    environment: StepEnvironment,
    moves: StepMoves,
    lock: Any,
    observer: Observer | None,
    *,
    may_rest: bool,
    skipped_ops: int,
) -> StateMoves | None:
    """Tell the extension which ops to record, and which saves and needs to log without telling the runner.

    Args:
        moves, lock, observer: of the step.
        may_rest: whether the first results of the step need not be recomputable.
        skipped_ops: ops of the step that have run before.

    Returns:
        The moves of model state that the plan makes; None if it makes none.
    """
    announce_rises()
    state_moves = None
    if environment.sliced_ops is not None:
        environment.sliced_ops.begin_step(
            environment.budget_bytes, state.watcher, state.storages.table, lock, observer,
            has_plan=state.phase is Phase.FOLLOWING_PLAN,
        )  # fmt: skip
    if state.phase is Phase.FOLLOWING_PLAN:
        expected = state.candidates[0]
        state.watcher.skip(skipped_ops)
        if state.segments or expected.plan.state:
            state.watcher.follow(*expected.replayed_ops)
        if (schedule := expected.state_schedule) is not None and environment.pager is not None:
            before, after = (schedule.list_positions(is_before=is_before) for is_before in (True, False))
            state.watcher.set_state_moves(before, after)
            tensors = schedule.tensors.find(environment.list_kept(), environment.name_residents)
            state_moves = StateMoves(schedule, environment.pager, tensors)
        due_tick = -1 if observer is not None else moves.due_tick  # -1: everything is reported at once
        state.saved_tensors.log(expected.plan_storages, moves.copied_storages, due_tick)
    else:
        resting_bytes = int(RESTING * environment.budget_bytes) if may_rest else 0
        state.watcher.record(resting_bytes, state.storages.min_bytes)
        if state.phase is Phase.UNPRESSURED:
            state.saved_tensors.log(frozenset(), frozenset(), NEVER)
    return state_moves
