"""Makes room on a device whose allocator does not ask for it, as the one of CUDA: before ops, after them, and after a
refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elbowroom.errors import Infeasible
from elbowroom.hooks.compiled_regions import undisturbed
from elbowroom.hooks.cuda_ledger import POOL_PAGE_BYTES
from elbowroom.runtime.action_executor import ActionExecutor
from elbowroom.runtime.deferred_events import DeferredEvents
from elbowroom.runtime.memory_guard import MemoryGuard
from elbowroom.runtime.phase import Phase
from elbowroom.runtime.state_moves import StateMoves, is_followed
from elbowroom.runtime.step_state import StepState


@undisturbed
class DeviceLimit:
    """Keeps the ops of one step within the budget. The extension calls its methods.

    Args:
        state: of the step.
        guard: counts bytes, and chooses what leaves.
        executor: performs moves.
        lock: of the step.
        prepare_to_evict: has the policy decide from now on, since bytes are missing for an op (0 if they are only
            guessed). Returns False if no budget holds.
        deferred: events that the policy is told late.
        state_moves: of the plan; None if it moves no model state.
    """

    def __init__(
        self,
        state: StepState,
        guard: MemoryGuard,
        executor: ActionExecutor,
        lock: Any,
        prepare_to_evict: Callable[[str, int], bool],
        deferred: DeferredEvents,
        state_moves: StateMoves | None,
    ) -> None:
        self._state = state
        self._guard = guard
        self._executor = executor
        self._lock = lock
        self._prepare_to_evict = prepare_to_evict
        self._deferred = deferred
        self._state_moves = state_moves

    def note_stream(self, number: int, index: int, kind: int) -> None:
        """Note that the step computes on this stream of the device and on others."""
        self._executor.transfers.streams.note_computing((number, index, kind))

    def make_room(self, op: str, nbytes: int) -> bool:
        """Free memory for an op that the allocator has refused, and that takes about so many bytes.

        Returns:
            Whether to run the op again; False if no budget holds any more.

        Raises:
            Infeasible: nothing more may leave.
        """
        with self._lock:
            missing_bytes = self._guard.count_missing(nbytes)
            was_unpressured = self._state.phase is Phase.UNPRESSURED  # so the limit is below the budget
            if missing_bytes <= 0 and not was_unpressured and self._guard.raise_limit():
                return True  # the budget has room where the allocator has none
            if not self._prepare_to_evict(op, missing_bytes):
                return False
            if missing_bytes <= 0 and was_unpressured:
                return True
            # Of a plan that is followed while managed, too.
            self._state.saved_tensors.leave(f"there is no room for {op}: {max(1, missing_bytes)} bytes are missing")
            try:
                actions = self._guard.evict(max(1, missing_bytes), nbytes, op)
            except Infeasible:  # if it takes as much: that is not certain
                if self._guard.raise_limit():
                    return True
                actions = self._guard.evict(1, 0, op)
            with self._guard.noting_moves():
                self._executor.perform(actions)
            self._deferred.set_marks()
            return True

    def prepare_room(self, op: str, nbytes: int, is_known: bool, is_sliceable: bool) -> None:
        """Make room for what an op probably takes.

        Args:
            is_known: whether the op has taken so much before. Otherwise that is a guess.
            is_sliceable: whether the op can run in slices. If it is known, too, it is refused if it misses more than a
                page.

        Raises:
            Infeasible: nothing more may leave, and the op is refused.
        """
        with self._lock:
            former = len(self._guard.ledger.refusals)
            try:
                self._evict(op, nbytes, leaves_plan=not self._guard.is_left_to_plan, is_guess=not is_known)
            except Infeasible:
                # What cuDNN takes varies a little, and perhaps no slices have the same bits.
                if is_known and is_sliceable and self._guard.count_missing(nbytes) > POOL_PAGE_BYTES:
                    raise
                del self._guard.ledger.refusals[former:]

    def lift_limit(self) -> None:
        """Have the allocator refuse nothing that the device has, until `restore_limit`."""
        self._guard.lift_limit()

    def restore_limit(self) -> None:
        """Have the allocator limit requests again."""
        self._guard.restore_limit()

    def keep_budget(self, op: str) -> None:
        """Make room after an op that went over the budget.

        Raises:
            Infeasible: nothing more may leave.
        """
        with self._lock:
            self._evict(op, 0, leaves_plan=True)

    def _evict(self, op: str, nbytes: int, *, leaves_plan: bool, is_guess: bool = False) -> None:
        # While a plan is followed, any state rather leaves than that the plan is left.
        choices = [True, False] if is_followed(self._state_moves) else [False]
        while (missing_bytes := self._guard.count_missing(nbytes)) > 0:
            is_following = self._state.phase is Phase.FOLLOWING_PLAN
            if not is_following or not any(
                self._guard.move_state(missing_bytes, spares_soon=spares_soon) for spares_soon in choices
            ):
                break
        why = f"{op}: {missing_bytes} bytes are missing"
        if missing_bytes > 0 and leaves_plan and self._prepare_to_evict(why, 0 if is_guess else missing_bytes):
            self._executor.make_room(nbytes, op)
            self._deferred.set_marks()
