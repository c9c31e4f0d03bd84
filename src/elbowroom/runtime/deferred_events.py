"""Deferred events: while the online policy alone decides, saves and needs of storages that stay are only logged.

The policy is told of them when it has to decide: at a shortage, when a storage is needed that has left, and at events
at which it may copy out or reload something early.
"""

from __future__ import annotations

from elbowroom.residency.machine import Machine
from elbowroom.runtime.action_executor import ActionExecutor
from elbowroom.runtime.event_log import EVENTS
from elbowroom.runtime.save_handles import SaveHandles
from elbowroom.runtime.step_policy import StepPolicy
from elbowroom.runtime.step_state import StepState


class DeferredEvents:
    """Events of one step that the policy has not been told of.

    Args:
        state, policy, executor, handles: of the step.
        is_observed: whether all events are reported at once, since an observer is told of them.

    Attributes:
        are_deferred: whether events are deferred now.
    """

    def __init__(
        self,
        state: StepState,
        policy: StepPolicy,
        executor: ActionExecutor,
        handles: SaveHandles,
        *,
        is_observed: bool,
    ) -> None:
        self._saved_tensors = state.saved_tensors
        self._machine: Machine = state.machine
        self._policy = policy
        self._executor = executor
        self._handles = handles
        self._is_observed = is_observed
        self.are_deferred = False

    def may_begin(self, followed: int) -> bool:
        """Tell whether events can be deferred in a step that follows a candidate with this index, or none if -1."""
        return followed < 0 and not self._is_observed and self._policy.may_wait()

    def begin(self, followed: int) -> None:
        """Defer events from now on, if possible."""
        if not self.are_deferred and self.may_begin(followed):
            self.are_deferred = True
            self._saved_tensors.defer()
            self.set_marks()

    def catch_up(self) -> None:
        """Tell the policy of the deferred events."""
        if self.are_deferred:
            entries = self._saved_tensors.take_log()
            self._handles.find_new()
            self._policy.watch(entries)
            self._free_released()

    def decide(self) -> None:
        """Tell the policy of the deferred events, and make the moves that it decides on at the last one."""
        *entries, last = self._saved_tensors.take_log() or [None]
        self._handles.find_new()
        self._policy.watch(entries)
        if last is not None:
            self._executor.perform(self._machine.feed(EVENTS[last[0]](last[1], last[2])))
        self._free_released()
        self.set_marks()

    def set_marks(self) -> None:
        """Set at how many live bytes a save or a need is reported at once: the policy may decide something then."""
        if self.are_deferred:
            self._saved_tensors.set_marks(*self._policy.find_marks())

    def _free_released(self) -> None:
        for saved in self._saved_tensors.take_released():
            self._executor.free_if_unused(saved)
