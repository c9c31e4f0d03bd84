"""Turns what autograd saves and needs into events, and carries out the machine's answers.

What should move is for `OnlineEngine` to say. Each step has an engine of its own, and the handles that autograd holds
point to it: several graphs can be in flight, a backward can come late, twice, or never.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from elbowroom.errors import TierError
from elbowroom.hooks.dispatch_keys import Hidden, get_alias
from elbowroom.hooks.exposed_memory import is_shared
from elbowroom.hooks.storage_ids import Identities, get_any_storage, make_test
from elbowroom.ir.actions import Action, Release
from elbowroom.ir.events import StorageFreed, StorageNeeded, StorageSaved
from elbowroom.runtime.account import Account, load_native
from elbowroom.runtime.known import Known
from elbowroom.runtime.locks import make_lock
from elbowroom.runtime.log import EVENTS, FREED, NEEDED, NO_STORAGE, SAVED
from elbowroom.runtime.mover import Mover
from elbowroom.runtime.residence import Handle, Residence, check_version
from elbowroom.runtime.transfers import Transfers

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Told what autograd does, while a step is being captured."""

    def saved(self, tensor: torch.Tensor) -> int: ...
    def needed(self, save: int, given: torch.Tensor) -> None: ...
    def save_released(self, save: int) -> None: ...


class Engine(Mover):
    """Runs one step. The extension calls it when a tensor is saved or needed that may have to move, or at which
    something is due; the rest it logs, as long as it is told to (`saved.log`).

    Args:
        transfers: moves bytes, for all steps of a room.
        device: storages elsewhere are left alone.
        account: of what is there.
        list_staying: the storages that may not leave: parameters, buffers and what else outlives the step.
        min_bytes: smaller storages stay, where no plan says otherwise.
        known: what the step may be, the likeliest first.
        spare_bytes: how many bytes may stay that should have left, if their move fails.
        observer: told what autograd does.

    Attributes:
        watcher, saved: the extension's; they watch the ops of this step, and what autograd saves and needs.
        drift: why the step left the traces that were known.
    """

    def __init__(
        self,
        transfers: Transfers,
        device: torch.device,
        account: Account,
        list_staying: Callable[[], Identities[bool]],
        min_bytes: int,
        *,
        known: Sequence[Known] = (),
        spare_bytes: int | None = None,
        observer: Observer | None = None,
    ) -> None:
        super().__init__(transfers, account, spare_bytes)
        self._min_bytes, self._observer = min_bytes, observer
        self._is_here = make_test(device.type)
        self._find_staying = functools.cache(list_staying)
        # Who retires a handle sees whose it is: what the garbage collector frees in the middle of a move has to wait.
        self._lock = make_lock()
        self._retired: deque[tuple[int, Residence | None]] = deque()
        self.drift = ""
        self._is_logging = False
        self._touched: frozenset[int] | None = None  # while logging: nobody is told when another storage is given up
        self._due_tick = -1
        native = load_native()
        self.watcher = native.OpWatch(device.type, account.table, self)
        timetables = [each.timetable for each in known]
        self.saved = native.SavedTensors(self.watcher, str(device), self, timetables, min_bytes)

    @property
    def saves(self) -> int:
        """Count the tensors that autograd has saved so far."""
        return int(self.saved.saves)

    @property
    def needs(self) -> int:
        """Count the tensors that autograd has asked for so far."""
        return int(self.saved.needs)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each save's storage, 0 for what is no plain block of bytes."""
        sizes: list[int] = self.saved.sizes
        return sizes

    # -- what the extension calls ---------------------------------------------------------------------------------

    def save(self, index: int, tensor: torch.Tensor, residence: Residence | None) -> Handle | None:
        """Autograd saves a tensor.

        Args:
            residence: of its storage; None for what is no plain block of bytes on the device.

        Returns:
            What stands for it; None if it stays as it is, and nobody has to be told when it is given up.
        """
        with self._lock:
            self._drain()
            if self._observer is not None:
                self._observer.saved(tensor)
            tick = self.saved.follow_save(index, None if residence is None else residence.record)
            is_known = self.saved.followed >= 0
            if residence is None or (self.saved.is_persistent(index) if is_known else residence.is_staying):
                self._pass(SAVED, tick)
                return None if self._observer is None else Handle(self, index, None, tensor._version)
            if residence.id < 0:
                residence.id = self.saved.make_id()
            if self._touched is not None and residence.id not in self._touched:
                self._pass(SAVED, tick, residence.id, residence.nbytes)
                return None
            self.saved.note(SAVED, residence.id, tick, residence.nbytes)
            self._bound[residence.id] = residence
            residence.add_view(index, get_alias(tensor))  # the tensor itself would hold the graph that holds it
            handle = Handle(self, index, residence, tensor._version)
            del tensor
            if actions := self._machine.feed(StorageSaved(residence.id, tick)):
                self._carry_out(actions)
            if not self._machine.is_on_device(residence.id):
                with Hidden():
                    residence.let_go()  # it has left already, and the program alone still holds it
            return handle

    def need(self, index: int, save: Any) -> torch.Tensor | None:
        """Autograd asks for a tensor back. Returns it; None if the extension has it, where it always was."""
        with self._lock:
            self._drain()
            tick = self.saved.follow_need(index, save.index)
            handle: Handle | None = save.handle
            residence = save.residence if handle is None else handle.residence
            given: torch.Tensor | None = None
            if handle is None or residence is None:
                self._pass(NEEDED, tick, NO_STORAGE if residence is None else residence.id)
            else:
                # Versions first, before anything moves: a step that is refused must leave everything as it is.
                view = residence.views[handle.index]
                if view.tensor._version != handle.version:
                    check_version(view.tensor, (view.geometry or view.tensor).shape, handle.version)
                self.saved.note(NEEDED, residence.id, tick, 0)
                actions = self._machine.feed(StorageNeeded(residence.id, tick))
                given = self._serve(residence, handle.index, actions) if actions else residence.view(handle.index)
            if self._observer is not None:
                self._observer.needed(save.index, save.tensor if given is None else given)
            return given

    def leave(self, why: str) -> None:
        """The step's ops are not those of its trace."""
        with self._lock:
            self.saved.leave(why)

    def leave_trace(self, why: str) -> None:
        """The step is not the trace that it followed."""
        raise NotImplementedError

    def _pass(self, event: int, tick: int, storage: int = NO_STORAGE, nbytes: int = 0) -> None:
        """Do what is due at a save or need of something that stays where it is."""
        self.saved.note(event, storage, tick, nbytes)
        if tick >= self._due_tick:
            self._carry_out(self._machine.feed(EVENTS[event](NO_STORAGE, tick)))
            self._due_tick = self._find_due_tick()
            if self._touched is not None:  # else Python is told of everything
                self.saved.due_tick = self._due_tick

    def _make_handle(self, save: Any) -> Handle:
        """Something else may move from now on: this may."""
        residence: Residence = save.residence
        residence.add_view(save.index, save.tensor)
        if save.is_written:
            residence.may_move = False  # as it is where something writes to what was saved
        self._bound[residence.id] = residence
        self._machine.add(residence.id)
        return Handle(self, save.index, residence, save.version)

    def _serve(self, residence: Residence, index: int, actions: Sequence[Action]) -> torch.Tensor:
        """It may be let go as soon as autograd has it."""
        gone = Release(residence.id)
        served = actions.index(gone) if gone in actions else len(actions)
        self._pinned.append(Counter((residence.id,)))  # or what is due beside it may have it leave again
        try:
            self._carry_out(actions[:served], actions[served:])
            given = residence.view(index)
        finally:
            self._pinned.pop()
        self._carry_out(actions[served:])
        return given

    def retire(self, index: int, residence: Residence | None) -> None:
        """A handle died. May be called at any moment, in any thread, by the garbage collector."""
        self._retired.append((index, residence))
        if self._lock._is_owned():
            return
        try:  # Ctrl-C may come between any two lines: the lock knows whether it is held, and a flag might not
            if self._lock.acquire(blocking=False):
                self._drain()
                self._lock.release()
        except BaseException:
            if self._lock._is_owned():
                self._lock.release()
            raise

    def _drain(self) -> None:
        """Where somebody has retired: asked first, since that is done at each call of autograd's."""
        while self._retired:
            index, residence = self._retired[0]
            if self._observer is not None:
                self._observer.save_released(index)
            if residence is not None:
                if residence.readers:
                    residence.storage = residence.find_storage()  # a replay will read it
                residence.discard_view(index)
                if not residence.views:
                    self._free_if_unused(residence)
            self._retired.popleft()  # done: what an exception has ended is done again by whoever comes next

    def _free_if_unused(self, residence: Residence) -> None:
        if residence.views or residence.readers or residence.id < 0:
            return
        self.saved.note(FREED, residence.id, 0, 0)
        if residence.copy is not None and self._machine.is_on_device(residence.id):
            with contextlib.suppress(TierError):  # nobody needs what may have been lost
                self._transfers.finish(residence.copy)  # its memory is in use by the transfer until then
        self._machine.feed(StorageFreed(residence.id, 0))
        if residence.recording is not None:
            self._forget_recording(residence)
        self._discard_copy(residence)
        residence.storage = residence.ghost = None
        self._bound.pop(residence.id, None)
        residence.id = -1  # the program may hold the storage still, and autograd may save it anew

    def _free_unused(self) -> None:
        """Free what autograd has given up."""
        for residence in list(self._bound.values()):
            self._free_if_unused(residence)

    # -- what the one who decides answers -------------------------------------------------------------------------

    def _find_due_tick(self) -> int:
        """Before this, nothing that is planned is due; -1 where that is not known."""
        return -1

    def _may_move(self, storage: int) -> bool:
        """Tell whether a storage may leave the device, where no plan says so."""
        residence = self._bound.get(storage)
        if residence is None or residence.nbytes < self._min_bytes:
            return False
        if residence.may_move is None:
            home = residence.find_storage()
            # Of what others write to unseen, autograd finds what they have written.
            residence.may_move = home is None or not (is_shared(home) or self._find_staying().find(home))
        return residence.may_move

    def _find_written(self, tensor: torch.Tensor) -> Residence | None:
        return None if (storage := get_any_storage(tensor)) is None else self.account.find(storage)

    def written(self, tensor: torch.Tensor) -> None:
        """An op has written to a tensor in place. What autograd then finds is what was written, as without us."""
        residence = self._find_written(tensor)
        if residence is not None:
            self._stay(residence, tensor.untyped_storage())

    def _stay(self, residence: Residence, home: torch.UntypedStorage) -> None:
        """Have autograd find what is in a storage when it asks, whoever has written that."""
        if not residence.views:
            return
        with self._lock:
            if residence.copy is not None:
                self._wait(residence)
                self._discard_copy(residence)
            if residence.find_storage() is not home:
                with Hidden():
                    residence.let_go()  # what came back while the program held the same
                residence.storage = home
            residence.may_move = False
            self._machine.refuse(residence.id)
            self._forget_recording(residence)
