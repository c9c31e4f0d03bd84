"""Virtual device: carries out moves and replays on a virtual clock, for planned and for online steps.

The time is the begin of the current entry in the plain step plus the delay so far: waits, replays, and compute time
lost to transfers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from elbowroom.cost.transfers import offload_seconds, reload_seconds
from elbowroom.ir.costs import Costs
from elbowroom.ir.placement import CopySlot
from elbowroom.ir.timeline import Activity, Lane
from elbowroom.simulator.clock import Lanes
from elbowroom.simulator.host_overflow import Overflow


@dataclasses.dataclass(slots=True)
class _Moved:
    """Totals of one step, as in its Forecast."""

    recompute_seconds: float = 0.0
    stall_seconds: float = 0.0
    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    state_offloaded_bytes: int = 0
    state_reloaded_bytes: int = 0


@dataclasses.dataclass(slots=True)
class _Level:
    """Bytes of the copies in one tier."""

    nbytes: int = 0
    peak_bytes: int = 0


class VirtualDevice:
    """Carries out the actions of one step in virtual time, and counts the bytes of copies in the lower tiers.

    Args:
        sizes: bytes of a copy of each storage.
        rounded: these bytes, rounded up as by allocators.
        overflow: treatment of copies that do not fit the host; None if the host is unlimited.

    Attributes:
        entry: tick of the current entry.
        begin: begin of the current entry in the plain step. The caller sets both.
        late: delay against the plain step, in seconds.
        delays: part of the delay that each entry added.
        waits: seconds of each wait for a transfer, by entry and storage.
        copy_slots: lifetimes of the copies that were freed.
        exposed_seconds: part of the delay that moves of each storage of the model's state caused.
        activities: transfers, waits and replays, without the time outside of ops.
    """

    def __init__(self, costs: Costs, sizes: Sequence[int], rounded: Sequence[int], overflow: Overflow | None) -> None:
        self._lanes = Lanes(costs.link)
        self._link = costs.link
        self._sizes, self._rounded = sizes, rounded
        self._overflow = overflow
        self.entry = 0
        self.begin = self.late = 0.0
        self.delays: dict[int, float] = {}
        self.waits: dict[tuple[int, int], float] = {}
        self.copy_slots: list[CopySlot] = []
        self.exposed_seconds: dict[int, float] = {}
        self.activities: list[Activity] = []
        self._done: dict[int, float] = {}  # when the last transfer of a storage is over
        self._below: dict[int, CopySlot] = {}
        self._state = frozenset[int]()
        self._host = _Level()
        self._disk = _Level()
        self._moved = _Moved()

    @property
    def now(self) -> float:
        """Seconds since the step began."""
        return self.begin + self.late

    def has_copy(self, storage: int) -> bool:
        """Return True if a storage has a copy in a lower tier."""
        return storage in self._below

    def keep_copies(self, storages: Sequence[int]) -> None:
        """Make room below for copies of the model's state, which stay: on the disk once the host is full."""
        overflow = self._overflow
        self._state = frozenset(storages)
        for storage in storages:
            rounded = self._rounded[storage]
            is_full = overflow is not None and self._host.nbytes + rounded > overflow.host_room_bytes
            self._below[storage] = CopySlot(
                storage=storage, begin=0, end=0, nbytes=self._sizes[storage], is_on_disk=is_full
            )
            self._count_copy(rounded, is_on_disk=is_full)

    def count_state_copies(self) -> tuple[int, int]:
        """Return the bytes of the state's copies on the host and on the disk."""
        on_host, on_disk = (
            sum(self._rounded[storage] for storage in self._state if self._below[storage].is_on_disk is is_on_disk)
            for is_on_disk in (False, True)
        )
        return on_host, on_disk

    def list_state_on_disk(self) -> frozenset[int]:
        """Return the storages of the model's state whose copies are on the disk behind the host."""
        return frozenset(storage for storage in self._state if self._below[storage].is_on_disk)

    def begin_next_step(self, seconds: float) -> None:
        """Begin the next step after one that took `seconds`: transfers under way go on, figures start anew."""
        self._lanes.shift(seconds)
        self._done = {storage: done - seconds for storage, done in self._done.items()}
        self.begin = self.late = 0.0
        self.delays = {}
        self.waits = {}
        self.copy_slots = []
        self.exposed_seconds = {}
        self.activities = [
            dataclasses.replace(each, begin=max(0.0, each.begin - seconds), end=each.end - seconds)
            for each in self.activities
            if each.end > seconds
        ]
        self._moved = _Moved()

    def offload(self, storage: int) -> None:
        """Start copying a storage to the tier below; if that is full, copy it to the disk and wait."""
        nbytes, rounded = self._sizes[storage], self._rounded[storage]
        overflow, now = self._overflow, self.now
        self._moved.offloaded_bytes += nbytes
        if storage in self._state:
            self._moved.state_offloaded_bytes += nbytes
        else:
            is_full = overflow is not None and self._host.nbytes + rounded > overflow.host_room_bytes
            self._below[storage] = CopySlot(
                storage=storage, begin=self.entry, end=self.entry, nbytes=nbytes, is_on_disk=is_full
            )
            self._count_copy(rounded, is_on_disk=is_full)
        if overflow is not None and self._below[storage].is_on_disk:
            done = self._done[storage] = self._lanes.send_through(overflow.disk, overflow.piece_bytes, nbytes, now)
            self.activities.append(Activity(Lane.OFFLOAD, storage, now, done))
            self.activities.append(Activity(Lane.DISK, storage, now, done))
            self._stall(storage, done - now)
            return
        done = self._done[storage] = self._lanes.send(nbytes, now)
        self.activities.append(Activity(Lane.OFFLOAD, storage, done - offload_seconds(self._link, nbytes), done))
        self._delay(nbytes * self._link.drag_seconds_per_byte, storage)

    def reload(self, storage: int) -> None:
        """Start copying a storage back; if its copy is on the disk, wait until all is read."""
        nbytes = self._sizes[storage]
        overflow = self._overflow
        now = self.now
        self._moved.reloaded_bytes += nbytes
        self._moved.state_reloaded_bytes += nbytes if storage in self._state else 0
        if overflow is not None and self._below[storage].is_on_disk:
            read, done = self._lanes.fetch_through(overflow.disk, overflow.piece_bytes, nbytes, now)
            self._done[storage] = done
            self.activities.append(Activity(Lane.DISK, storage, now, read))
            self.activities.append(Activity(Lane.RELOAD, storage, now, done))
            self._stall(storage, read - now)
            return
        done = self._done[storage] = self._lanes.fetch(nbytes, now)
        self.activities.append(Activity(Lane.RELOAD, storage, done - reload_seconds(self._link, nbytes), done))
        self._delay(nbytes * self._link.drag_seconds_per_byte, storage)

    def wait(self, storage: int) -> float:
        """Wait for the last transfer of a storage. Return the seconds waited."""
        seconds = max(0.0, self._done.get(storage, 0.0) - self.now)
        if seconds > 0.0:
            self.waits[self.entry, storage] = seconds
        self._stall(storage, seconds)
        return seconds

    def replay(self, seconds: float) -> None:
        """Advance the clock by a replay."""
        self._moved.recompute_seconds += seconds
        self.activities.append(Activity(Lane.RECOMPUTE, -1, self.now, self.now + seconds))
        self._delay(seconds)

    def discard_copy(self, storage: int) -> None:
        """Free the copy of a storage, if any, when its claim ends. Copies of the model's state stay."""
        if storage in self._state:
            return
        copy = self._below.pop(storage, None)
        if copy is None:
            return
        self.copy_slots.append(dataclasses.replace(copy, end=self.entry))
        if copy.is_on_disk:
            self._disk.nbytes -= self._rounded[storage]
        else:
            self._host.nbytes -= self._rounded[storage]

    def list_figures(self) -> dict[str, Any]:
        """Return the fields of a Forecast about moves and replays."""
        return {
            **dataclasses.asdict(self._moved),
            "lower_tier_bytes": self._host.peak_bytes,
            "disk_bytes": self._disk.peak_bytes,
        }

    def _count_copy(self, rounded: int, *, is_on_disk: bool) -> None:
        level = self._disk if is_on_disk else self._host
        level.nbytes += rounded
        level.peak_bytes = max(level.peak_bytes, level.nbytes)

    def _stall(self, storage: int, seconds: float) -> None:
        self._moved.stall_seconds += seconds
        if seconds > 0.0:
            self.activities.append(Activity(Lane.STALL, storage, self.now, self.now + seconds))
        self._delay(seconds, storage)

    def _delay(self, seconds: float, storage: int | None = None) -> None:
        """Delay the step. `storage`: whose move is the cause; None for a replay."""
        if seconds > 0.0:
            if storage in self._state:
                self.exposed_seconds[storage] = self.exposed_seconds.get(storage, 0.0) + seconds
            self.late += seconds
            self.delays[self.entry] = self.delays.get(self.entry, 0.0) + seconds
