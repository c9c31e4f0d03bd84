"""Selects the policy for each phase of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elbowroom.ir.actions import Release
from elbowroom.residency.capacity_first import Policy as CapacityFirst
from elbowroom.residency.capacity_then_online import Policy as CapacityThenOnline
from elbowroom.residency.machine import Drop, State
from elbowroom.residency.online import Online
from elbowroom.residency.plan_policy import Policy as PlanPolicy
from elbowroom.residency.plan_then_online import Policy as Guided
from elbowroom.runtime.event_log import read_log
from elbowroom.runtime.phase import Phase
from elbowroom.runtime.step_context import StepContext
from elbowroom.runtime.step_state import StepState


class StepPolicy:
    """Sets the machine's policy when the phase changes and when the step follows another plan.

    Args:
        state: state of the step. The machine's initial policy is capacity-first.
        context: context that the online policy uses.
        online: the online policy.
    """

    def __init__(self, state: StepState, context: StepContext, online: Online) -> None:
        self._state = state
        self._machine = state.machine
        self._begin = context.begin
        self._online = online

    def begin(self) -> None:
        """Set the first policy. If the online policy cannot wait for events, enter MANAGED at once."""
        state = self._state
        if state.phase is Phase.UNPRESSURED and not self._online.may_wait():
            state.enter(Phase.MANAGED)
        if state.phase is Phase.FOLLOWING_PLAN:
            self._machine.policy = PlanPolicy(state.candidates[0].moves)
        elif state.phase is Phase.CAPTURING and not self._online.history.is_bounded:  # else the tier below may get full
            self._machine.policy = CapacityThenOnline(self._online, state.storages.may_move)
        else:
            self.manage(0 if state.candidates else -1, -1)

    def leave_out_copies(self) -> None:
        """Leave moves of storages that the plan only copies to `PlannedMoves`."""
        self._machine.policy = PlanPolicy(self._state.candidates[0].other_moves)

    def take_over(self, tick: int) -> None:
        """Make all moves of the plan from a tick on. Those that were made before do no harm."""
        self._machine.policy = PlanPolicy(self._state.candidates[0].moves, since=tick)

    @property
    def due_tick(self) -> int:
        """First tick at which the plan moves something; -1 in a phase that does not follow the plan alone."""
        plan = self._machine.policy
        return plan.due_tick if isinstance(plan, PlanPolicy) else -1

    def may_wait(self) -> bool:
        """Tell whether the online policy may be told of events later."""
        return self._online.may_wait()

    def find_marks(self) -> tuple[int, int]:
        """Return at how many live bytes at most, at a need, and at least, at a save, the online policy may decide
        something."""
        return self._online.find_marks()

    def was_short(self) -> bool:
        """Tell whether the online policy has been told of a shortage in this step."""
        return self._online.history.present.was_tight

    def watch(self, entries: Iterable[Any]) -> None:
        """Replay the log into the online policy."""
        for event, moment, nbytes in read_log(entries, self._begin, self._state.storages.by_id):
            self._online.watch(event, moment, nbytes)

    def catch_up(self, entries: Iterable[Any]) -> None:
        """Replay the log (`SavedTensors.tell`) into the online policy, and report which storages are off the device."""
        self.watch(entries)
        for storage in self._state.storages.by_id:
            if self._machine.state(storage) is State.AWAY:
                self._online.learn(Release(storage))
        for storage in self._state.storages.by_id:
            segment = self._machine.segment_of(storage)
            if segment is not None:
                self._online.learn(Drop(storage, segment))

    def manage(self, followed: int, tick: int) -> None:
        """Use the online policy, along with the rest of a candidate's plan from `tick` on. `followed`: its index or
        -1."""
        state = self._state
        if followed < 0:
            sizes = state.saved_tensors.sizes
            state.is_unlike_any = len(sizes) == 1 and all(sizes[0] != each.first_bytes for each in state.candidates)
            may_move = state.storages.may_move
            self._machine.policy = CapacityThenOnline(self._online, may_move) if state.is_awaited else self._online
        else:
            self._machine.policy = Guided(self._online, state.candidates[followed].plan, since=tick)

    def close(self) -> None:
        """Use capacity-first: storages come back when they are needed, and leave again after that."""
        self._machine.policy = CapacityFirst(self._state.storages.may_move)
