"""Makes the moves of the storages that a plan only copies, while the step follows it.

The extension has these storages (`PlannedStorages`): their saves, needs and releases do not call Python. What cannot be
done as planned is left to the machine (`StepRunner`), which then has to take the storages over.
"""

from __future__ import annotations

import contextlib

from elbowroom.errors import NO_ROOM, TierError
from elbowroom.hooks.dispatch_keys import Hidden
from elbowroom.hooks.exposed_memory import is_shared
from elbowroom.ir.placement import CopySlot
from elbowroom.residency.plan_policy import COPIES, NEVER, RELOADS
from elbowroom.runtime.action_executor import SHARED
from elbowroom.runtime.memory_guard import MemoryGuard
from elbowroom.runtime.step_state import StepState
from elbowroom.runtime.transfers import Transfers


class PlannedMoves:
    """Makes the copies, releases and reloads of one step, at the events for which they are planned.

    Args:
        state: of the step, which follows its first candidate.
        guard: tells whether there is room for what comes back.
        transfers: moves bytes.

    Attributes:
        due_tick: tick of the next move.
        begun_tick: moves before this tick have been made.
        failed: storage whose offload has failed, and why; None if none has.
    """

    def __init__(self, state: StepState, guard: MemoryGuard, transfers: Transfers) -> None:
        candidate = state.candidates[0]
        self._state = state
        self._storages = state.saved_tensors.planned
        self._alignment_bytes = state.storages.alignment_bytes
        self._sizes = candidate.trace.storages
        self._moves = candidate.copy_moves
        self._guard = guard
        self._transfers = transfers
        self._next = 0
        self._reloads: list[int] = []
        self.due_tick = self._moves[0][0]
        self.begun_tick = -1
        self.failed: tuple[int, str] | None = None  # not the error, whose frames hold this object

    def discard_freed(self) -> None:
        """Discard the copies of storages that autograd has given up."""
        for copy, is_moving in self._storages.take_freed():
            if is_moving:
                with contextlib.suppress(TierError):  # the contents, which may be lost, are not needed any more
                    self._transfers.finish(copy)
            self._transfers.discard(copy)

    def leave(self, tick: int) -> bool:
        """Make the copies and releases that are due. Return False if one of them has to be made by the machine."""
        self.discard_freed()
        self.begun_tick = min(tick, self.due_tick)
        moves, index = self._moves, self._next
        while self.due_tick <= tick:
            _, order, storage, slot = moves[index]
            if order == RELOADS:
                self._reloads.append(storage)
            elif not (self._offload(storage, slot) if order == COPIES else self._release(storage)):
                return False
            index += 1
            self._next = index
            self.due_tick = moves[index][0] if index < len(moves) else NEVER
        return True

    def come_back(self, tick: int) -> bool:
        """Begin the reloads that are due. Return False if one of them has to be made by the machine."""
        for storage in self._reloads:
            if not self._reload(storage):
                return False
        self._reloads.clear()
        self.begun_tick = tick + 1
        return True

    def bring(self, storage: int) -> bool:
        """Have a storage come back that is needed now. Return False if that is left to the machine.

        Raises:
            TierError: it could not be read.
        """
        if not self._reload(storage):
            return False
        copy = self._storages.find_arriving(storage)
        if copy is not None:
            try:
                self._transfers.finish(copy)
            except TierError:
                self._storages.lose(storage)
                raise
            self._storages.finish(storage)
        return True

    def _offload(self, storage: int, slot: CopySlot | None) -> bool:
        home = self._storages.find_resident(storage)
        if home is None:
            return True  # it has a copy, or autograd has given it up
        if is_shared(home):  # others may write to it: it stays
            self._state.refusal = self._state.refusal or SHARED
            return True
        if self._guard.is_paged(home):
            return True  # an op in slices has moved it out in place, and it leaves in place again
        try:
            with Hidden():
                copy = self._transfers.offload(home, slot)
        except TierError:
            return False
        self._state.activity_log.name_transfer(copy, storage)
        self._storages.begin_leaving(storage, copy)
        return True

    def _release(self, storage: int) -> bool:
        self._transfers.streams.meet()
        copy = self._storages.release(storage)
        if copy is not None:
            try:
                self._transfers.finish(copy)
            except TierError as error:
                self.failed = storage, str(error)
                return False
            self._storages.finish(storage)
            self._storages.release(storage)
        return True

    def _reload(self, storage: int) -> bool:
        copy = self._storages.find_away(storage)
        if copy is None:
            return True  # it has not left, or the program still holds it
        alignment_bytes = self._alignment_bytes
        nbytes = -(-self._sizes[storage].nbytes // alignment_bytes) * alignment_bytes
        while (missing_bytes := self._guard.count_missing(nbytes)) > 0:
            if not self._guard.move_state(missing_bytes, spares_soon=True):
                return False
        try:
            with Hidden():
                back = self._transfers.reload(copy)
        except (TierError, *NO_ROOM):
            return False
        self._state.activity_log.name_transfer(copy, storage)
        self._storages.begin_arriving(storage, back)
        return True
