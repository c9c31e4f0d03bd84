"""What autograd saves and needs while nothing has to leave: it is put down, and whoever decides is told when it does.

One flat path for each, since most steps that fit take no other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from elbowroom.hooks.hidden import Unwatched, get_alias
from elbowroom.hooks.identity import get_plain_storage
from elbowroom.ir.events import StorageNeeded, StorageSaved
from elbowroom.runtime.account import Account
from elbowroom.runtime.past import NO_STORAGE, Passing, Past
from elbowroom.runtime.residence import Guest, Keepsake, check_version


class Calm:
    """Stands in for an engine.

    Args:
        past: where events are put down.
        account: of what is there.
        sizes: of the step's saves; grows.
        is_here: whether a tensor is on the device.
        ids: the first id that a storage may be given here.

    Attributes:
        ids: the first that none has.
    """

    def __init__(
        self,
        past: Past,
        account: Account,
        sizes: list[int],
        is_here: Callable[[torch.Tensor], bool],
        ids: int,
    ) -> None:
        self._past: Past | None = past
        self._account, self._sizes = account, sizes
        self._is_here = is_here
        self._guests = past.guests
        self.ids = ids

    def save(self, index: int, tensor: torch.Tensor) -> Keepsake:
        """A handle to a tensor that autograd puts aside."""
        storage = get_plain_storage(tensor) if self._is_here(tensor) else None
        if storage is None:
            self._sizes.append(0)
            self._note(StorageSaved, NO_STORAGE, index)
            with Unwatched():
                return Keepsake(index, tensor.detach(), tensor._version)
        nbytes = storage.nbytes()
        self._sizes.append(nbytes)
        residence = self._account.see(storage)
        if residence.is_staying:  # whatever happens, it will be there
            self._note(StorageSaved, NO_STORAGE, index)
            return Keepsake(index, get_witness(tensor), tensor._version)
        if residence.id < 0:
            residence.id, self.ids = self.ids, self.ids + 1
        self._note(StorageSaved, residence.id, index, nbytes)
        guest = Guest(index, residence, get_alias(tensor), tensor._version)
        self._guests.append(weakref.ref(guest))
        return guest

    def need(self, tick: int, handle: Keepsake) -> torch.Tensor:
        """The tensor of a handle."""
        given, residence = handle.tensor, handle.residence
        assert given is not None
        if given._version != handle.version:
            check_version(given, given.shape, handle.version)
        self._note(StorageNeeded, NO_STORAGE if residence is None else residence.id, tick)
        return given

    def end(self) -> None:
        """The step is over, and what is there may stay as it is."""
        self._guests.clear()
        self._past = None

    def _note(self, event: type[Passing], storage: int, tick: int, nbytes: int = 0) -> None:
        if self._past is not None:
            self._past.add(event, storage, tick, nbytes)


def get_witness(tensor: torch.Tensor) -> torch.Tensor:
    """What to keep of a saved tensor that stays. A leaf itself has no graph to hold, and autograd without us would keep
    just that: a program may give it other contents (`leaf.data = ...`) before they are needed."""
    return tensor if tensor.is_leaf else get_alias(tensor)
