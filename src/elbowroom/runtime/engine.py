"""What autograd saves and needs becomes events, and the machine's answers are carried out.

What should move is for `OnlineEngine` to say. Each step has an engine of its own, and the handles that autograd holds
point to it: several graphs can be in flight, a backward can come late, twice, or never.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence

import torch

from elbowroom.errors import TierError
from elbowroom.hooks.hidden import Hidden, Unwatched, get_alias
from elbowroom.hooks.identity import Identities, get_any_storage, get_plain_storage, is_shared, make_test
from elbowroom.ir.actions import Action, Release
from elbowroom.ir.events import StorageFreed, StorageNeeded, StorageSaved
from elbowroom.runtime.account import Account
from elbowroom.runtime.calm import Calm, get_witness
from elbowroom.runtime.follower import Follower, Known, Observer
from elbowroom.runtime.locks import make_lock
from elbowroom.runtime.mover import Mover
from elbowroom.runtime.past import NO_STORAGE, Past
from elbowroom.runtime.residence import Guest, Handle, Keepsake, Residence, check_version
from elbowroom.runtime.transfers import Transfers

logger = logging.getLogger(__name__)


class Engine(Mover):
    """Runs one step. Who is derived from it says when the machine may be told later: for as long as there is a `_past`,
    what happens is put down there; while it is `_calm`, that is all that is done. Where only what is `_touched` may
    move, the machine need not know of the rest, nor anybody when that is given up: it is a guest.

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
        saves, needs: hook calls so far.
        sizes: bytes of each save, 0 for what is no plain block of bytes.
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
        self._own_ids = max((len(each.trace.storages) for each in known), default=0)
        self.saves = self.needs = 0
        self.sizes: list[int] = []
        self.drift = ""
        self._follower = Follower(known, min_bytes, self._bound, self._leave_trace, self._count_ops, self._set_due)
        self._past: Past | None = None
        self._calm: Calm | None = None
        self._touched: frozenset[int] | None = None
        self._due_tick = -1

    # -- what autograd calls --------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Keepsake:
        """Autograd puts a tensor aside; it gets a handle to keep instead."""
        with self._lock:
            index = self.saves
            self.saves = index + 1
            if self._calm is not None:
                return self._calm.save(index, tensor)
            if self._retired:
                self._drain()
            storage = get_plain_storage(tensor) if self._is_here(tensor) else None
            if self._observer is not None:
                self._observer.saved(tensor)
            if storage is None:
                self.sizes.append(0)
                tick = self._follower.follow_save(index, None)
                with Unwatched():
                    alias = tensor.detach()
                return self._keep(index, alias, tensor._version, tick)
            residence = self.account.see(storage)
            self.sizes.append(residence.nbytes)
            tick = self._follower.follow_save(index, residence)
            is_unknown = self._follower.followed is None
            if residence.is_staying if is_unknown else self._follower.is_lasting(index):  # whatever happens
                return self._keep(index, get_witness(tensor), tensor._version, tick)
            alias = get_alias(tensor)  # the tensor itself would hold the graph that holds it
            if residence.id < 0:
                residence.id, self._own_ids = self._own_ids, self._own_ids + 1
            if self._touched is not None and residence.id not in self._touched:
                assert self._past is not None
                guest = Guest(index, residence, alias, tensor._version)
                self._past.guests.append(weakref.ref(guest))
                self._pass(StorageSaved, tick, residence.id, residence.nbytes)
                return guest
            if self._past is not None:
                self._past.add(StorageSaved, residence.id, tick, residence.nbytes)
            self._bound[residence.id] = residence
            residence.add_view(index, alias)
            handle = Handle(self, index, residence, None, tensor._version)
            del storage, alias
            if actions := self._machine.feed(StorageSaved(residence.id, tick)):
                self._carry_out(actions)
            if not self._machine.is_on_device(residence.id):
                with Hidden():
                    residence.let_go()  # it has left already, and the program alone still holds it
            return handle

    def unpack(self, handle: Keepsake) -> torch.Tensor:
        """Autograd asks for a tensor back."""
        with self._lock:
            index = self.needs
            self.needs = index + 1
            if self._calm is not None:
                return self._calm.need(index, handle)
            if self._retired:
                self._drain()
            tick = self._follower.follow_need(index, handle.index)
            residence, given = handle.residence, handle.tensor
            # Versions first, before anything moves: a step that is refused must leave everything as it is.
            if given is not None:
                if given._version != handle.version:
                    check_version(given, given.shape, handle.version)
                self._pass(StorageNeeded, tick, NO_STORAGE if residence is None else residence.id)
            else:
                assert residence is not None
                view = residence.views[handle.index]
                if view.tensor._version != handle.version:
                    check_version(view.tensor, (view.geometry or view.tensor).shape, handle.version)
                if self._past is not None:
                    self._past.add(StorageNeeded, residence.id, tick)
                actions = self._machine.feed(StorageNeeded(residence.id, tick))
                given = self._serve(residence, handle.index, actions) if actions else residence.view(handle.index)
            if self._observer is not None:
                self._observer.needed(handle.index, given)
            return given

    def _keep(self, index: int, alias: torch.Tensor, version: int, tick: int) -> Keepsake:
        """What stays where it is was saved."""
        self._pass(StorageSaved, tick)
        if self._observer is None:
            return Keepsake(index, alias, version)
        return Handle(self, index, None, alias, version)

    def _pass(
        self, event: type[StorageSaved | StorageNeeded], tick: int, storage: int = NO_STORAGE, nbytes: int = 0
    ) -> None:
        """What is saved or needed stays where it is, but something else may be due."""
        if self._past is not None:
            self._past.add(event, storage, tick, nbytes)
        if tick >= self._due_tick:
            self._carry_out(self._machine.feed(event(NO_STORAGE, tick)))
            self._due_tick = self._find_due_tick()

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
        if self._past is not None:
            self._past.add(StorageFreed, residence.id, 0)
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

    def _settle_in(self, guests: Iterable[Guest]) -> None:
        """Something else may move from now on."""
        for guest in guests:
            guest.settle(self)
            self._bound[guest.residence.id] = guest.residence
            self._machine.add(guest.residence.id)
        self._free_unused()

    def _free_unused(self, guests: Iterable[Guest] = ()) -> None:
        """Of what autograd has given up but for some guests: nobody is told when one goes."""
        there = {guest.residence for guest in guests}
        for residence in [each for each in self._bound.values() if each not in there]:
            self._free_if_unused(residence)

    # -- what the one who decides answers -------------------------------------------------------------------------

    def _leave_trace(self, why: str) -> None:
        """The step is not the trace that it followed."""
        raise NotImplementedError

    def _find_due_tick(self) -> int:
        """Before this, nothing that is planned is due; -1 where that is not known."""
        return -1

    def _count_ops(self) -> int:
        return int(self.watcher.ops)

    def _set_due(self, ops: int) -> None:
        self.watcher.due_ops = ops

    def _may_move(self, storage: int) -> bool:
        """Whether a storage may leave the device, where no plan says so."""
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
        if residence is None or not residence.views:
            return
        with self._lock:
            if residence.copy is not None:
                self._wait(residence)
                self._discard_copy(residence)
            if residence.find_storage() is not (home := tensor.untyped_storage()):
                with Hidden():
                    residence.let_go()  # what came back while the program held the same
                residence.storage = home
            residence.may_move = False
            self._machine.refuse(residence.id)
            self._forget_recording(residence)
