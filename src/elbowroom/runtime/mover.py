"""Carries out what the machine answers: copies storages out and back, lets them go, and has them computed again.

If an action fails, the machine is told where the storages really are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from elbowroom.errors import ElbowroomError, Infeasible, InternalError, TierError
from elbowroom.hooks.dispatch_keys import Hidden
from elbowroom.hooks.exposed_memory import is_shared
from elbowroom.ir.actions import Action, Offload, Recompute, Release, Reload
from elbowroom.ir.placement import CopySlot
from elbowroom.residency.machine import Machine, State
from elbowroom.runtime.account import Account
from elbowroom.runtime.replays import Recording, replay
from elbowroom.runtime.residence import Residence
from elbowroom.runtime.transfers import Transfers


class Mover:
    """Moves the storages of one step. Who is derived from it makes the machine, and says what may be replayed.

    Args:
        transfers: moves bytes, for all steps of a room.
        account: of what is there.
        spare_bytes: how many bytes may stay that should have left, if their move fails.

    Attributes:
        recomputed: segments replayed.
        refusal: why a storage could not leave the device.
        given_up: why storages could not be computed when the step ended.
        watcher: the extension's, which watches the ops of this step.
    """

    _machine: Machine
    watcher: Any

    def __init__(self, transfers: Transfers, account: Account, spare_bytes: int | None) -> None:
        self._transfers, self.account, self._spare_bytes = transfers, account, spare_bytes
        self._bound: dict[int, Residence] = {}
        self._pinned: list[Counter[int]] = []  # by whoever needs them to be there: how often
        self.recomputed, self.refusal = 0, ""
        self.given_up = ""

    def _prepare_replay(self, residence: Residence) -> bool:
        """Make sure a storage about to be dropped can be computed again, whatever the step does next."""
        raise NotImplementedError

    def _find_copy_slot(self, storage: int) -> CopySlot | None:
        """Find where the copy of a storage that leaves now was planned to lie; None if nobody planned one."""
        raise NotImplementedError

    def _may_move(self, storage: int) -> bool:
        """Tell whether a storage may leave the device, where no plan says so."""
        raise NotImplementedError

    def _free_if_unused(self, residence: Residence) -> None:
        """Forget a storage, if nothing is of any use any more."""
        raise NotImplementedError

    def _carry_out(self, actions: Sequence[Action], later: Sequence[Action] = ()) -> None:
        """Perform actions in order. If one fails, the machine is told what became of it and of those after it."""
        for position, action in enumerate(actions):
            try:
                self._perform(action)
            except BaseException as error:
                is_early = isinstance(action, Reload) and self._machine.state(action.storage) is State.ARRIVING
                if is_early and isinstance(error, Infeasible):
                    self._correct(action)  # nobody waits for it: it comes when it is needed, and may find room then
                    continue
                for undone in (*actions[position:], *later):
                    self._correct(undone)
                raise

    def _correct(self, action: Action) -> None:
        """The machine believes an action done that was not: tell it where the storages really are."""
        for storage in action.outputs if isinstance(action, Recompute) else (action.storage,):
            residence = self._bound.get(storage)
            if residence is None:
                continue
            copied = residence.copy is not None
            if residence.find_storage() is None:
                self._machine.correct(storage, State.AWAY if copied else State.DROPPED, copied)
            elif not copied:
                self._machine.correct(storage, State.RESIDENT, copied)
            else:
                self._machine.correct(storage, State.LEAVING if residence.storage is None else State.ARRIVING, copied)

    def _perform(self, action: Action) -> None:
        if isinstance(action, Recompute):
            self._recompute(action)
            return
        residence = self._bound[action.storage]
        if isinstance(action, Offload):
            self._offload(residence)
        elif isinstance(action, Reload):
            self._reload(residence)
        elif isinstance(action, Release):
            dropped = self._machine.segment_of(residence.id) is not None
            if self._prepare_replay(residence) if dropped else residence.copy is not None:
                with Hidden():
                    residence.let_go()
            else:
                self._machine.refuse(residence.id)
                if dropped and self._may_move(residence.id):  # no way back as planned, and its room is spoken for
                    self._carry_out(self._machine.evict([residence.id]))
        else:
            self._wait(residence)

    def _offload(self, residence: Residence) -> None:
        storage = residence.find_storage()
        assert storage is not None
        if is_shared(storage):  # others may write to it until autograd asks for it
            self._machine.refuse(residence.id)
            self.refusal = self.refusal or "NumPy or another process shares its memory"
            return
        try:
            with Hidden():
                residence.copy = self._transfers.offload(storage, self._find_copy_slot(residence.id))
        except TierError as error:
            if not self._keep_instead(residence, str(error)):
                raise

    def _reload(self, residence: Residence) -> None:
        if residence.revive():
            self._discard_copy(residence)
            self._machine.refuse(residence.id)
            return
        if residence.copy is None:
            if residence.find_storage() is None:
                raise InternalError(f"storage {residence.id} is to be reloaded, and there is no copy of it")
            return  # it was to leave at this very tick, and could not
        with Hidden():
            residence.storage = self._transfers.reload(residence.copy)
        self.account.put(residence.storage, residence)

    def _discard_copy(self, residence: Residence) -> None:
        copy, residence.copy = residence.copy, None  # first: nothing may be brought back from what has been given up
        if copy is not None:
            self._transfers.discard(copy)

    def _wait(self, residence: Residence) -> None:
        if residence.copy is None:
            return
        try:
            self._transfers.finish(residence.copy)
        except TierError as error:
            if residence.storage is not None:
                # It was coming back, and there is nothing else to give autograd; but its copy is still there.
                residence.storage = None
                raise
            self._discard_copy(residence)
            if not self._keep_instead(residence, str(error)):
                raise

    def _keep_instead(self, residence: Residence, why: str) -> bool:
        """A storage could not leave. It stays if there is room for it, or nobody knows how much there is."""
        self._machine.refuse(residence.id)
        if self._spare_bytes is not None:
            if residence.nbytes > self._spare_bytes:
                return False
            self._spare_bytes -= residence.nbytes
        self.refusal = self.refusal or why
        return True

    def _hold_recording(self, residence: Residence, recording: Recording) -> None:
        residence.recording, residence.reads = recording, (*recording.leaves, *recording.sources)
        for read in residence.reads:
            read.add_reader(residence)

    def _forget_recording(self, residence: Residence) -> None:
        reads, residence.recording, residence.reads = residence.reads, None, ()
        for read in reads:
            read.discard_reader(residence)
            self._free_if_unused(read)

    def _recompute(self, action: Recompute) -> None:
        outputs = [self._bound[storage] for storage in action.outputs]
        missing = [residence for residence in outputs if not residence.revive()]
        recordings = [residence.recording for residence in missing if residence.recording is not None]
        if len(recordings) != len(missing):
            if self.given_up:
                raise ElbowroomError(
                    "this graph is of a step that has ended, and what its backward pass needs was given up then: "
                    f"{self.given_up} Run its forward pass again."
                )
            raise InternalError(f"segment {action.segment} was not recorded")
        if missing:
            replay(recordings, missing)
            self.recomputed += 1
        for residence in missing:
            assert residence.storage is not None
            self.account.put(residence.storage, residence)
        for residence in outputs:
            self._forget_recording(residence)
