"""Counts the bytes of all storages that a step has seen and that are still there."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable

import torch

from elbowroom.hooks.identity import Identities
from elbowroom.runtime.residence import Residence

NO_LIMIT = 1 << 62
"""Bytes. Of a step that is asleep, and of one that is over."""

MOST_DEAD = 256
"""Storages that are counted after their death, where there is room all the same."""


class _Place(weakref.ref[torch.UntypedStorage]):
    """A storage, its residence if anybody has asked for it, and what is counted for it.

    One object a storage, since every step makes thousands.
    """

    __slots__ = ("item", "key", "nbytes")

    item: Residence | None
    key: int
    nbytes: int
    is_staying = False


class _StayingPlace(_Place):
    """Of a storage that outlives the step."""

    __slots__ = ()

    is_staying = True


class Account(Identities[Residence]):
    """The residence of each living storage, and what they take together. Several threads may use it at once.

    Args:
        alignment_bytes: a block takes a multiple of it.
        adopt: told of each storage that was there before the step used it.

    Attributes:
        lock: held while anything is counted.
        counted_bytes: what is there, what was reserved, and what has died since somebody looked.
        limit_bytes: no more is to be there; whoever makes room says so.
        most_bytes: most that there was when room was reserved; whoever asks for it sets it back.
    """

    def __init__(self, alignment_bytes: int, adopt: Callable[[torch.UntypedStorage], object] | None = None) -> None:
        super().__init__()
        self._adopt = adopt
        self._places: dict[int, _Place] = {}
        # A storage may die at any moment, in any thread: its bytes are taken off when somebody looks.
        self._dead: deque[_Place] = deque()
        self._on_place_death = self._dead.append  # a method of C: quick, and safe at any moment
        self._alignment = alignment_bytes
        self.counted_bytes = 0
        self.limit_bytes = NO_LIMIT
        self.most_bytes = 0
        self.lock = threading.RLock()

    def find(self, storage: torch.UntypedStorage) -> Residence | None:
        """The residence of a storage, or None if it has none."""
        place = self._places.get(id(storage))
        return place.item if place is not None and place() is storage else None

    def put(self, storage: torch.UntypedStorage, item: Residence) -> None:
        """Count a storage. `item.nbytes` is its size from now on."""
        with self.lock:
            self._add(storage, item.nbytes).item = item

    def count(self, storage: torch.UntypedStorage, reserved_bytes: int = 0, item: Residence | None = None) -> bool:
        """Count a storage that the step has made, for which so much was reserved; whether it is new. Few are asked for
        later.

        One function, since it is called for each result.
        """
        key = id(storage)
        with self.lock:
            place = self._places.get(key)
            if place is not None and place() is storage:
                self.counted_bytes -= reserved_bytes
                return False
            place = _Place(storage, self._on_place_death)
            place.item, place.key = item, key
            place.nbytes = nbytes = -(-storage.nbytes() // self._alignment) * self._alignment
            self._places[key] = place  # whole, for whoever looks without the lock
            self.counted_bytes += nbytes - reserved_bytes
            return True

    def welcome(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Count what was there before the step and will be after it. Few are asked for later."""
        with self.lock:
            for storage in storages:
                place = self._places.get(key := id(storage))
                if place is not None and place() is storage:  # it is listed twice, or the step has used it
                    if not place.is_staying:
                        self.see(storage).is_staying = True
                        place.__class__ = _StayingPlace
                    continue
                place = _StayingPlace(storage, self._on_place_death)
                place.item, place.key = None, key
                place.nbytes = nbytes = -(-storage.nbytes() // self._alignment) * self._alignment
                self._places[key] = place
                self.counted_bytes += nbytes

    def see_moving(self, storage: torch.UntypedStorage) -> Residence | None:
        """The residence of a storage as `see` finds it, or None if it is known to outlive the step."""
        place = self._places.get(id(storage))
        if place is not None and place() is storage:
            if place.is_staying:
                return None
            if place.item is not None:
                return place.item
        return self.see(storage)

    def meet(self, storage: torch.UntypedStorage, reserved_bytes: int) -> Residence:
        """The same of one that will be asked for; its residence, which is new unless the storage was known."""
        place = self._places.get(id(storage))
        if place is None or place() is not storage:
            residence = Residence(storage.nbytes())
            if self.count(storage, reserved_bytes, residence):
                return residence
        else:
            self.reserve(-reserved_bytes)
        return self.see(storage)

    def see(self, storage: torch.UntypedStorage, *, is_outside: bool = True) -> Residence:
        """The residence of a storage; counted from now on if it was not."""
        place = self._places.get(id(storage))
        if place is not None and place() is storage:
            if place.item is not None:
                return place.item
            is_outside = is_staying = place.is_staying
        else:
            is_staying = False
            if is_outside and self._adopt is not None:
                self._adopt(storage)
        residence = Residence(storage.nbytes())
        residence.is_outside, residence.is_staying = is_outside, is_staying
        with self.lock:
            place = self._places.get(id(storage))  # another thread may have put it
            if place is None or place() is not storage:
                place = self._add(storage, residence.nbytes)
            elif place.item is None:
                self._resize(place, residence.nbytes)
            else:
                return place.item
            place.item = residence
            return residence

    def _add(self, storage: torch.UntypedStorage, nbytes: int) -> _Place:
        place = _Place(storage, self._on_place_death)
        place.item, place.key = None, id(storage)
        place.nbytes = self.round(nbytes)
        self._places[place.key] = place
        self.counted_bytes += place.nbytes
        return place

    def close(self) -> None:
        """Forget everything."""
        with self.lock:
            self._places.clear()
            self._dead.clear()
            self.counted_bytes = 0

    def reserve(self, nbytes: int) -> None:
        """Count what is about to be allocated; negative once that has been done, or not."""
        with self.lock:
            self.counted_bytes += nbytes

    def reserve_within(self, nbytes: int) -> bool:
        """The same if no more than the limit is there then; says whether it was."""
        with self.lock:
            there = self.counted_bytes + nbytes
            # Whether anything died matters only where there would be too much without it, or more than ever.
            if there > self.most_bytes or len(self._dead) > MOST_DEAD:
                self._bury()
                there = self.counted_bytes + nbytes
            if there > self.limit_bytes:
                return False
            self.counted_bytes = there
            if there > self.most_bytes:
                self.most_bytes = there
            return True

    def has_room(self, nbytes: int, most: int) -> bool:
        """Whether no more than `most` would be there with so much beside it."""
        if self.counted_bytes + nbytes <= most and len(self._dead) <= MOST_DEAD:
            return True
        return self.live_bytes + nbytes <= most

    def measure(self, storage: torch.UntypedStorage) -> Residence | None:
        """Count a storage anew, which an op may have resized. Its residence; None if it stays, and nobody has asked."""
        place = self._places.get(id(storage))
        if place is None or place() is not storage or (place.item is None and not place.is_staying):
            return self.see(storage)
        size = storage.nbytes()
        if place.item is not None:
            place.item.nbytes = size
        if self.round(size) != place.nbytes:
            with self.lock:
                self._resize(place, size)
        return place.item

    def _resize(self, place: _Place, nbytes: int) -> None:
        nbytes = self.round(nbytes)
        self.counted_bytes += nbytes - place.nbytes
        place.nbytes = nbytes

    def round(self, nbytes: int) -> int:
        """What a block of so many bytes takes."""
        return -(-nbytes // self._alignment) * self._alignment

    @property
    def live_bytes(self) -> int:
        """What is there, and what was reserved."""
        with self.lock:
            self._bury()
            return self.counted_bytes

    def _bury(self) -> None:
        while self._dead:
            place = self._dead.popleft()
            self.counted_bytes -= place.nbytes
            if self._places.get(place.key) is place:
                del self._places[place.key]
