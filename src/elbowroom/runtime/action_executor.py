"""Performs the machine's actions: copies storages out and back, releases them, and computes them again.

If an action fails, the machine is told where the storages really are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from elbowroom.errors import NO_ROOM, DeviceFull, InternalError, SavedTensorLost, TierError
from elbowroom.hooks.dispatch_keys import Hidden
from elbowroom.hooks.exposed_memory import is_shared
from elbowroom.ir.actions import Action, Offload, Recompute, Release, Reload, Wait
from elbowroom.ir.events import StorageFreed, StorageRestored
from elbowroom.ir.plan import Segment
from elbowroom.residency.machine import State, count_reads
from elbowroom.runtime.compute_streams import meeting
from elbowroom.runtime.error_frames import clear_frames
from elbowroom.runtime.event_log import FREED
from elbowroom.runtime.memory_guard import MemoryGuard
from elbowroom.runtime.replays import Recording, count_bytes, is_exposed, list_reads, replay
from elbowroom.runtime.save_handles import SaveHandles
from elbowroom.runtime.saved_storage import SavedStorage
from elbowroom.runtime.step_context import StepContext
from elbowroom.runtime.step_state import StepState
from elbowroom.runtime.thrash_guard import ThrashGuard
from elbowroom.runtime.transfers import Transfers

T = TypeVar("T")

SHARED = "NumPy or another process shares its memory"


class ActionExecutor:
    """Performs the actions of one step.

    Args:
        state: of the step.
        context: of the step.
        guard: tells whether there is room for what comes back, and what leaves if there is none.
        thrash: checked after each wait and replay.
        transfers: moves bytes.
        handles: takes over saved tensors before their storages move.
        spare_bytes: bytes that may stay although the plan has them leave, if their move fails.

    Attributes:
        transfers: as given.
    """

    def __init__(
        self,
        state: StepState,
        context: StepContext,
        guard: MemoryGuard,
        thrash: ThrashGuard,
        transfers: Transfers,
        handles: SaveHandles,
        spare_bytes: int,
    ) -> None:
        self._state = state
        self._machine = state.machine
        self._storages = state.storages
        self._context = context
        self._guard = guard
        self._thrash = thrash
        self.transfers = transfers
        self._handles = handles
        self._spare_bytes = spare_bytes
        self._planned_segments = len(state.segments)

    def perform(self, actions: Sequence[Action], later: Sequence[Action] = ()) -> None:
        """Perform actions in order. If one fails, correct the machine for it and all after it, `later` included."""
        by_id = self._storages.by_id
        moves_back = any(isinstance(action, Reload | Recompute) for action in actions)
        # While a chain is computed, storages that its later links read may not leave.
        self._context.pinned.append(count_reads(actions, self._state.segments) if moves_back else {})
        try:
            for position, action in enumerate(actions):
                if not isinstance(action, Reload | Recompute) and action.storage not in by_id:
                    continue  # a replay before was the last to read it
                try:
                    match action:
                        case Offload():
                            self._offload(by_id[action.storage])
                        case Wait():
                            self.wait(by_id[action.storage])
                        case Release():
                            self._release(by_id[action.storage])
                        case Reload():
                            self._reload(by_id[action.storage])
                        case Recompute():
                            self._recompute(action)
                except BaseException as error:
                    is_early = isinstance(action, Reload) and self._machine.state(action.storage) is State.ARRIVING
                    if is_early and isinstance(error, NO_ROOM):
                        self._correct(action)  # it is repeated when the storage is needed, and may find room then
                        continue
                    for undone in (*actions[position:], *later):
                        self._correct(undone)
                    raise
        finally:
            self._context.pinned.pop()

    def serve(self, saved: SavedStorage, index: int, actions: Sequence[Action]) -> torch.Tensor:
        """Perform the actions that a need has led to, and return the saved tensor before its storage is released."""
        storage = saved.record.id
        served = len(actions)
        for position, action in enumerate(actions):
            if isinstance(action, Release) and action.storage == storage:
                served = position
                break
        self._context.pinned.append({storage: 1})  # else the other actions might have it leave again
        try:
            self.perform(actions[:served], actions[served:])
            given = saved.view(index)
        finally:
            self._context.pinned.pop()
        if served < len(actions):
            self.perform(actions[served:])
        return given

    def wait(self, saved: SavedStorage) -> None:
        """Wait for the last transfer of a storage."""
        if saved.copy is not None:
            try:
                self.transfers.finish(saved.copy)
            except TierError as error:
                if saved.storage is not None:
                    # It was coming back, and there is nothing else to give autograd; but its copy is still there.
                    saved.storage = None
                    raise
                self.stay(saved, str(error))
        if not self._state.phase.follows_plan:
            self._thrash.check()

    def stay(self, saved: SavedStorage, why: str) -> None:
        """Keep a storage whose offload has failed."""
        self.discard_copy(saved)
        self._keep(saved, why)

    def discard_copy(self, saved: SavedStorage) -> None:
        """Give up the copy of a storage in the tier below, if there is one."""
        self._state.stuck_bytes.clear()  # there is room below again
        copy = saved.copy
        saved.copy = None  # first: a copy that was given up must not be reloaded
        if copy is not None:
            self.transfers.discard(copy)

    def forget_recording(self, saved: SavedStorage) -> None:
        """Forget how a storage is computed again."""
        for read in saved.forget_recording():
            read.discard_reader(saved)
            self.free_if_unused(read)

    def free_if_unused(self, saved: SavedStorage) -> None:
        """Forget a storage if autograd has given it up and no replay reads it."""
        storage = saved.record.id
        if saved.is_saved() or saved.readers or storage < 0:
            return
        self._state.saved_tensors.note(FREED, storage, 0, 0)
        if saved.copy is not None and self._machine.is_on_device(storage):
            with contextlib.suppress(TierError):  # the contents, which may be lost, are not needed any more
                self.transfers.finish(saved.copy)  # until then the transfer uses the memory of the storage
        self._machine.feed(StorageFreed(storage, 0))
        if saved.recording is not None:
            self.forget_recording(saved)
        self.discard_copy(saved)
        saved.storage = None
        saved.released_ref = None
        self._storages.by_id.pop(storage, None)
        saved.record.forget_saves()  # the program may hold the storage still, and autograd may save it anew
        self._context.forget(storage)

    def free_unused(self) -> None:
        """Forget each storage that autograd has given up and no replay reads."""
        for saved in list(self._storages.by_id.values()):
            self.free_if_unused(saved)

    def _correct(self, action: Action) -> None:
        """Tell the machine where the storages of an action really are, since the action was not performed."""
        for storage in action.outputs if isinstance(action, Recompute) else (action.storage,):
            saved = self._storages.by_id.get(storage)
            if saved is None:
                continue
            is_copied = saved.copy is not None
            if saved.find_storage() is None:
                self._machine.correct(storage, State.AWAY if is_copied else State.DROPPED, is_copied)
            elif not is_copied:
                self._machine.correct(storage, State.RESIDENT, is_copied)
            else:
                self._machine.correct(storage, State.LEAVING if saved.storage is None else State.ARRIVING, is_copied)

    def _offload(self, saved: SavedStorage) -> None:
        storage = saved.find_storage()
        assert storage is not None
        if is_shared(storage):  # others may write to it until autograd asks for it
            self._machine.refuse(saved.record.id)
            self._state.refusal = self._state.refusal or SHARED
            return
        if self._guard.is_paged(storage):  # an op in slices has moved it out in place, and it leaves in place again
            self._machine.refuse(saved.record.id)
            return
        saved_tensors = self._state.saved_tensors
        slot = None
        if saved_tensors.followed >= 0:
            placement = self._state.candidates[saved_tensors.followed].placement
            slot = placement.find(saved.record.id, saved_tensors.tick)
        self._handles.take(saved)
        try:
            with Hidden():
                saved.copy = self.transfers.offload(storage, slot)
            self._state.activity_log.name_transfer(saved.copy, saved.record.id)
        except TierError as error:
            self._keep(saved, str(error))

    def _release(self, saved: SavedStorage) -> None:
        if saved.copy is not None or self._prepare_replay(saved):
            self.transfers.streams.meet()
            self._handles.take(saved)
            saved.release()
            return
        storage = saved.record.id
        is_dropped = self._machine.segment_of(storage) is not None
        self._machine.refuse(storage)
        # There is no way back as planned, and its room is needed for something else.
        if is_dropped and self._storages.may_move(storage) and (actions := self._machine.evict([storage])):
            self.perform(actions)

    def _reload(self, saved: SavedStorage) -> None:
        if saved.revive():
            self.discard_copy(saved)
            self._machine.refuse(saved.record.id)
            return
        if saved.copy is None:
            if saved.find_storage() is None:
                raise InternalError(f"storage {saved.id} is to be reloaded, and there is no copy of it")
            return  # it was to leave at this very tick, and could not
        alignment_bytes = self._storages.alignment_bytes
        nbytes = -(-saved.record.nbytes // alignment_bytes) * alignment_bytes
        if self._guard.count_missing(nbytes) > 0:
            is_early = self._machine.state(saved.record.id) is State.ARRIVING  # it is repeated when it is needed
            self.make_room(nbytes, f"a reload of {saved.nbytes} bytes", waits=not is_early)
        copy = saved.copy
        with Hidden():
            saved.storage = self._retry(
                lambda: self.transfers.reload(copy), DeviceFull, nbytes, f"a reload of {saved.nbytes} bytes"
            )
        self._state.activity_log.name_transfer(saved.copy, saved.record.id)
        self._storages.table.put(saved.storage, saved.record)

    def _recompute(self, action: Recompute) -> None:
        segment = self._state.segments[action.segment]
        outputs = [self._storages.by_id[storage] for storage in action.outputs]
        gone = [saved for saved in outputs if saved.find_released() is None]
        nbytes = self._make_room_for([saved.recording for saved in gone if saved.recording is not None], segment)
        begin = time.perf_counter()
        missing = [saved for saved in outputs if not saved.revive()]
        recordings = [saved.recording for saved in missing if saved.recording is not None]
        if len(recordings) != len(missing):
            if self._state.given_up:
                raise SavedTensorLost(
                    "this graph is of a step that has ended, and what its backward pass needs was given up then: "
                    f"{self._state.given_up} Run its forward pass again."
                )
            raise InternalError(f"segment {action.segment} was not recorded")
        if missing:
            what, table = f"a replay of {len(segment.ops)} ops", self._storages.table
            self._state.watcher.restore_limit()  # it can be repeated
            with self._state.activity_log.replaying(), meeting(self.transfers.streams):
                self._guard.repeat_refused(
                    lambda: self._retry(
                        lambda: replay(recordings, missing, table), torch.OutOfMemoryError, nbytes, what
                    ),
                    lambda: list_reads(recordings, missing),
                )
            self._state.recomputed += 1
        for saved in missing:
            self._storages.table.put(saved.storage, saved.record)
        for saved in outputs:
            self.forget_recording(saved)
        if not self._state.phase.follows_plan:
            self._thrash.replay_seconds += time.perf_counter() - begin
            self._thrash.check()
        reads = self._context.pinned[-1]
        for leaf in segment.leaves:
            reads[leaf] -= 1

    def _make_room_for(self, recordings: Sequence[Recording], segment: Segment) -> int:
        """Make room for a replay. Return the bytes that it allocates.

        What the program holds and is away comes back during the replay, when results can no longer leave to make room.
        """
        nbytes, what = count_bytes(recordings), f"a replay of {len(segment.ops)} ops"
        if not self._state.phase.follows_plan:
            away_bytes = self._guard.count_away([each for recording in recordings for each in recording.kept])
            with contextlib.suppress(*NO_ROOM):  # one op may not need all of it at once
                self.make_room(nbytes + away_bytes, what)
        self.make_room(nbytes, what)
        return nbytes

    def _retry(self, call: Callable[[], T], refusal: type[Exception], nbytes: int, what: str) -> T:
        """Call, and again after each refusal of a device's allocator while anything may leave."""
        while True:
            try:
                return call()
            except refusal as error:
                if self._guard.raise_limit():
                    continue
                if not self._state.phase.has_budget:
                    raise
                clear_frames(error)
            if self._state.phase.follows_plan:
                self._state.saved_tensors.leave(f"there is no room for {what}")
            self.perform(self._guard.evict(1, nbytes, what))

    def make_room(self, nbytes: int, what: str, *, waits: bool = True) -> None:
        """Have storages leave until there is room for so many bytes. A plan that has none for them is left.

        Raises:
            Infeasible: nothing more may leave.
        """
        idle_rounds = 0
        while (missing_bytes := self._guard.count_missing(nbytes)) > 0:
            if idle_rounds > len(self._storages.by_id):
                raise self._guard.refuse(missing_bytes, nbytes, what)  # what should leave cannot
            if self._guard.move_state(missing_bytes, spares_soon=True):
                continue
            if self._state.phase.follows_plan:
                self._state.saved_tensors.leave(f"there is no room for {what}: {missing_bytes} bytes are missing")
            actions = self._guard.evict(missing_bytes, nbytes, what, waits=waits)
            with self._guard.noting_moves():
                self.perform(actions)
            idle_rounds += self._guard.count_missing(nbytes) >= missing_bytes

    def _keep(self, saved: SavedStorage, why: str) -> None:
        """Keep a storage that could not leave. Leaves a plan that has no room for it: others can leave instead."""
        storage = saved.record.id
        self._machine.refuse(storage)
        self._state.refusal = self._state.refusal or why
        if self._state.phase.follows_plan:
            self._spare_bytes -= saved.nbytes
            if self._spare_bytes >= 0:
                return
            self._state.saved_tensors.leave(why)
        self._state.stuck_bytes[storage] = saved.nbytes
        self._machine.policy.decide(StorageRestored(storage, self._state.events))  # which may have it dropped later

    def _prepare_replay(self, saved: SavedStorage) -> bool:
        """Make sure that a storage about to be dropped can be computed again, whatever the step does next."""
        segment = self._machine.segment_of(saved.record.id)
        if segment is None or not self._storages.may_move(saved.record.id):
            return False
        recording: Recording | None
        if segment < self._planned_segments:
            planned = self._state.segments[segment]
            recording = self._state.watcher.make_recording(list(planned.ops), saved.record)
            is_whole = bool(recording.places) and {leaf.id for leaf in recording.leaves}.issubset(planned.leaves)
            if not is_whole or not recording.is_open(self._storages.table) or is_exposed(recording, saved):
                return False
        else:
            recording = self._context.find_safe_recording(saved)
            if recording is None:
                return False
        reads = (*recording.leaves, *recording.sources)
        for read in reads:
            self._handles.take(read)
        if not recording.is_open(self._storages.table):
            return False  # another thread has released a storage that it reads
        saved.recording = recording
        saved.reads = reads
        for read in saved.reads:
            read.add_reader(saved)
        return True
