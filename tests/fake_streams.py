"""A device on a CPU whose lanes run as late, as early, or as randomly as events allow; and a program to run on it.

Nothing that is enqueued runs before something forces it or the test lets time pass. Device memory is an arena whose
blocks are reused as soon as a storage dies, overwritten at that point of the compute lane as a next owner would, and
filled with garbage when handed out. Copies and computing know addresses only. So a transfer that lacks an edge moves
wrong bytes in some schedule.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from elbowroom.errors import TierFull, TransferFailed
from elbowroom.layout.free_list import FreeList
from elbowroom.runtime.compute_streams import StreamNumbers
from elbowroom.runtime.streams import StreamEvent
from elbowroom.runtime.transfers import Copy, Transfers
from elbowroom.tiers.pinned import SlabBlock

GARBAGE = 0xCB
ALIGNMENT_BYTES = 64
LANES = ("compute", "out", "back")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "random": (),
    "copies late": ("compute", "back", "out"),
    "copies out late": ("back", "compute", "out"),
    "copies back late": ("compute", "out", "back"),
    "copies early": ("out", "back", "compute"),
    "copies back early": ("back", "out", "compute"),
}
"""Which lane goes on first where several could."""


class Pageable:
    """Pins nothing, in place of `tiers.pinned.CudaPinning`."""

    def pin(self, address: int, nbytes: int) -> bool:
        return True

    def unpin(self, address: int) -> None:
        pass


def pattern(number: int, nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """What the contents called `number` look like."""
    positions = torch.arange(nbytes, dtype=torch.int32, device=device)
    return ((positions * 7 + number * 31 + positions // 251) % 199).to(torch.uint8)


class FakeEvent:
    def __init__(self, lane: str) -> None:
        self.lane, self.done = lane, False

    def is_done(self) -> bool:
        return self.done


class _Operation:
    def __init__(self, action: Callable[[], object] | None, after: list[FakeEvent], event: FakeEvent) -> None:
        self.action, self.after, self.event = action, after, event
        self.host: tuple[int, int] | None = None


class FakeStreams:
    """Implements `Streams`, and `Pinning` for the host memory that goes with it."""

    def __init__(self, seed: int = 0, schedule: str = "random", capacity_bytes: int = 1 << 17) -> None:
        self.device = torch.device("cpu")
        self.violations: list[str] = []
        self.pinned: dict[int, int] = {}
        self._random = random.Random(seed)
        self._order = SCHEDULES[schedule]
        # About two operations are enqueued at a time: the lanes fall far behind, keep up by fits and starts, or follow.
        self._paces = self._random.choice(((0,), (0, 0, 0, 0, 1, 2, 3, 40), (0, 1, 2, 3, 8, 30)))
        self._lanes: dict[str, deque[_Operation]] = {lane: deque() for lane in LANES}
        self._arena = torch.full((capacity_bytes,), GARBAGE, dtype=torch.uint8)
        self._free = FreeList(capacity_bytes, ALIGNMENT_BYTES)
        self.live_bytes = 0

    # Streams ----------------------------------------------------------------------------------------------------

    def record_compute(self) -> FakeEvent:
        return self._enqueue("compute", None, [])

    def copy_out(
        self, source: torch.UntypedStorage, host: SlabBlock, after: Sequence[StreamEvent], source_offset: int = 0
    ) -> FakeEvent:
        assert source_offset + host.nbytes <= source.nbytes()
        return self._copy("out", source.data_ptr() + source_offset, host, after)

    def copy_in(
        self, host: SlabBlock, target: torch.UntypedStorage, after: Sequence[StreamEvent], target_offset: int = 0
    ) -> FakeEvent:
        assert target_offset + host.nbytes <= target.nbytes()
        return self._copy("back", target.data_ptr() + target_offset, host, after)

    def _copy(self, lane: str, address: int, host: SlabBlock, after: Sequence[StreamEvent]) -> FakeEvent:
        memory, begin, nbytes = host.slab.memory, host.address, host.nbytes

        def copy() -> None:
            # The host memory lives as long as this closure, so nothing can crash.
            assert memory.data_ptr() + host.offset == begin
            ctypes.memmove(*((begin, address) if lane == "out" else (address, begin)), nbytes)

        event = self._enqueue(lane, copy, after)
        self._lanes[lane][-1].host = (begin, begin + nbytes)
        return event

    def compute_waits(self, event: StreamEvent) -> None:
        self._enqueue("compute", None, [event])

    def note_computing(self, stream: StreamNumbers) -> None:
        pass

    def meet(self) -> None:
        pass

    def host_waits(self, event: StreamEvent) -> None:
        assert isinstance(event, FakeEvent)
        while not event.done:
            assert self.advance(1), "deadlock: the event can never be done"

    def host_waits_for_copies(self) -> None:
        while self._lanes["out"] or self._lanes["back"]:
            assert self.advance(1), "deadlock: a copy can never be done"

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        offset = self._free.take(nbytes)
        if offset is None:
            raise TransferFailed(f"the fake device has no {nbytes} bytes")
        self.live_bytes += nbytes
        self._overwrite(offset, nbytes)
        array = (ctypes.c_uint8 * nbytes).from_address(self._arena.data_ptr() + offset)
        # The storage owns the array, so this runs when the last tensor and the last storage are gone.
        weakref.finalize(array, self._died, offset, nbytes).atexit = False
        return torch.frombuffer(array, dtype=torch.uint8).untyped_storage()

    def _died(self, offset: int, nbytes: int) -> None:
        self.live_bytes -= nbytes
        self._overwrite(offset, nbytes)
        self._free.give(offset, nbytes)

    def _overwrite(self, offset: int, nbytes: int) -> None:
        address = self._arena.data_ptr() + offset
        self._enqueue("compute", lambda: ctypes.memset(address, GARBAGE, nbytes), [])

    # Pinning ----------------------------------------------------------------------------------------------------

    def pin(self, address: int, nbytes: int) -> bool:
        self.pinned[address] = nbytes
        return True

    def unpin(self, address: int) -> None:
        end = address + self.pinned.pop(address, 0)
        for operation in (operation for lane in self._lanes.values() for operation in lane):
            if operation.host is not None and operation.host[0] < end and address < operation.host[1]:
                self.violations.append("host memory was given back under a transfer")

    # What the program computes ----------------------------------------------------------------------------------

    def write(self, storage: torch.UntypedStorage, number: int) -> None:
        """Compute something: the storage holds `pattern(number)` afterwards."""
        data, address = bytes(pattern(number, storage.nbytes()).numpy()), storage.data_ptr()
        self._enqueue("compute", lambda: ctypes.memmove(address, data, len(data)), [])

    def check(self, storage: torch.UntypedStorage, number: int, what: str) -> None:
        """Compute with it: a violation if it does not hold `pattern(number)` by then."""
        address, nbytes = storage.data_ptr(), storage.nbytes()
        expected = bytes(pattern(number, nbytes).numpy())

        def compare() -> None:
            if ctypes.string_at(address, nbytes) != expected:
                self.violations.append(f"{what} does not hold what it should")

        self._enqueue("compute", compare, [])

    def pause(self) -> None:
        """Let some time pass, or none."""
        self.advance(self._random.choice(self._paces))

    # Time -------------------------------------------------------------------------------------------------------

    def _enqueue(self, lane: str, action: Callable[[], object] | None, after: Sequence[StreamEvent]) -> FakeEvent:
        event, events = FakeEvent(lane), [event for event in after if isinstance(event, FakeEvent)]
        self._lanes[lane].append(_Operation(action, events, event))
        return event

    def advance(self, count: int) -> int:
        """Run up to `count` operations; how many ran."""
        for ran in range(count):
            ready = [name for name, lane in self._lanes.items() if lane and all(e.done for e in lane[0].after)]
            if not ready:
                return ran
            lane = min(ready, key=self._order.index) if self._order else self._random.choice(ready)
            operation = self._lanes[lane].popleft()
            if operation.action is not None:
                operation.action()
            operation.event.done = True
        return count

    def drain(self) -> None:
        """Let everything run."""
        while self.advance(100):
            pass
        assert not any(self._lanes.values()), "deadlock: some operations wait for what never comes"


class ForgetfulStreams(FakeStreams):
    """Drops one kind of edge: ("copy_in", "out") is that a copy back does not wait for copies out."""

    def __init__(self, seed: int, schedule: str, forgets: tuple[str, str]) -> None:
        super().__init__(seed, schedule)
        self._waiter, self._waited_for = forgets

    def _kept(self, waiter: str, after: Sequence[StreamEvent]) -> list[StreamEvent]:
        return [
            event
            for event in after
            if waiter != self._waiter or not isinstance(event, FakeEvent) or event.lane != self._waited_for
        ]

    def copy_out(
        self, source: torch.UntypedStorage, host: SlabBlock, after: Sequence[StreamEvent], source_offset: int = 0
    ) -> FakeEvent:
        return super().copy_out(source, host, self._kept("copy_out", after), source_offset)

    def copy_in(
        self, host: SlabBlock, target: torch.UntypedStorage, after: Sequence[StreamEvent], target_offset: int = 0
    ) -> FakeEvent:
        return super().copy_in(host, target, self._kept("copy_in", after), target_offset)

    def compute_waits(self, event: StreamEvent) -> None:
        for kept in self._kept("compute", [event]):
            super().compute_waits(kept)

    def host_waits(self, event: StreamEvent) -> None:
        for kept in self._kept("host", [event]):
            super().host_waits(kept)


class Device(Protocol):
    """What a program needs besides transfers; `FakeStreams` has it."""

    def allocate(self, nbytes: int) -> torch.UntypedStorage: ...
    def write(self, storage: torch.UntypedStorage, number: int) -> None: ...
    def check(self, storage: torch.UntypedStorage, number: int, what: str) -> None: ...
    def pause(self) -> None: ...


class _Item:
    """One storage of the program, and its copy. `state` is fresh, leaving, settled, coming or ending."""

    def __init__(self, number: int, storage: torch.UntypedStorage) -> None:
        self.number, self.storage = number, storage
        self.state = "fresh"
        self.has_storage = True
        self.copied_number = -1
        self.copy: Copy | None = None
        self.moving: list[torch.UntypedStorage] = []


class Program:
    """Uses transfers in a random but legal way, and computes with everything that comes back.

    Args:
        is_careful: whether it keeps every storage that is being moved until it has finished or discarded the copy.
            The contract asks for it; `StreamTransfers` does not need it.
    """

    def __init__(
        self,
        transfers: Transfers,
        device: Device,
        seed: int,
        max_bytes: int = 9000,
        items: int = 12,
        is_careful: bool = False,
    ) -> None:
        self.transfers, self.device = transfers, device
        self._random = random.Random(seed)
        self._max_bytes, self._max_items = max_bytes, items
        self._items: list[_Item] = []
        self._numbers = 0
        self._is_careful = is_careful
        self.refusals = 0

    def run(self, steps: int) -> None:
        """Take some steps, then discard everything. What was refused for lack of room is left out."""
        for _ in range(steps):
            with contextlib.suppress(TransferFailed):
                self._step()
            self.device.pause()
        for item in list(self._items):
            with contextlib.suppress(TransferFailed):
                if item.state == "ending":
                    self._ending(item)
                elif item.copy is not None:
                    if self._random.random() < 0.5:
                        self._finish(item)
                    self.transfers.discard(item.copy)
        self._items.clear()

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _step(self) -> None:
        if len(self._items) < self._max_items and self._random.random() < 0.3:
            storage = self.device.allocate(self._random.randint(1, self._max_bytes))
            self._items.append(_Item(self._number(), storage))
            self.device.write(storage, self._items[-1].number)
        elif self._items:
            item = self._random.choice(self._items)
            getattr(self, "_" + item.state)(item)

    def _finish(self, item: _Item) -> None:
        assert item.copy is not None
        try:
            self.transfers.finish(item.copy)
        except TransferFailed:  # there is nothing in it, or nothing came back
            self.transfers.discard(item.copy)
            self._items.remove(item)
            raise

    def _fresh(self, item: _Item) -> None:
        choice = self._random.choice(("offload", "offload", "offload", "use", "use", "rewrite", "drop"))
        if choice == "offload":
            try:
                item.copy = self.transfers.offload(item.storage)
            except TierFull:
                self.refusals += 1
            else:
                item.copied_number, item.state = item.number, "leaving"
        elif choice == "use":
            self.device.check(item.storage, item.number, "a storage without a copy")
        elif choice == "rewrite":
            self._rewrite(item)
        else:
            self._items.remove(item)

    def _leaving(self, item: _Item) -> None:
        assert item.copy is not None
        choice = self._random.choice(("finish", "finish", "finish and release", "use", "reload", "discard", "abandon"))
        if choice.startswith("finish"):
            self._finish(item)
            item.moving.clear()
            item.state = "settled"
            if choice == "finish and release":
                self._release(item)
        elif choice == "use":
            self.device.check(item.storage, item.number, "a storage being offloaded")
        elif choice == "reload":
            self._reload(item)
        elif choice == "discard":
            self._discard(item)
        else:  # the copy is discarded and the storage dropped although the transfer has not been finished
            self.transfers.discard(item.copy)
            self._items.remove(item)

    def _settled(self, item: _Item) -> None:
        if item.has_storage:
            choice = self._random.choice(("release", "release", "use", "rewrite", "reload", "discard"))
        else:
            choice = "reload"
        if choice == "release":
            self._release(item)
        elif choice == "use":
            self.device.check(item.storage, item.number, "a storage beside its copy")
        elif choice == "rewrite":
            self._rewrite(item)
        elif choice == "reload":
            self._reload(item)
        else:
            self._discard(item)

    def _coming(self, item: _Item) -> None:
        assert item.copy is not None
        choice = self._random.choice(("finish", "finish", "finish and discard", "discard", "again", "abandon"))
        if choice.startswith("finish"):
            self._finish(item)
            item.moving.clear()
            self.device.check(item.storage, item.number, "a reloaded storage")
            item.state = "settled"
            if choice == "finish and discard":
                self._discard(item)
        elif choice == "discard":  # its room may be another's before the transfer has been finished, or has run
            copy = item.copy
            self._discard(item)
            item.state, item.copy = "ending", copy
        elif choice == "again":
            self._reload(item)
        else:
            self.transfers.discard(item.copy)
            self._items.remove(item)

    def _ending(self, item: _Item) -> None:
        assert item.copy is not None
        self._finish(item)
        item.moving.clear()
        self.device.check(item.storage, item.number, "a reloaded storage whose copy was discarded")
        item.state, item.copy = "fresh", None

    def _rewrite(self, item: _Item) -> None:
        item.number = self._number()
        self.device.write(item.storage, item.number)

    def _release(self, item: _Item) -> None:
        item.storage, item.has_storage = torch.empty(0, dtype=torch.uint8).untyped_storage(), False

    def _reload(self, item: _Item) -> None:
        assert item.copy is not None
        storage = self.transfers.reload(item.copy)
        if self._is_careful:
            item.moving.append(item.storage)
        item.storage, item.has_storage = storage, True
        item.number, item.state = item.copied_number, "coming"

    def _discard(self, item: _Item) -> None:
        assert item.copy is not None
        self.transfers.discard(item.copy)
        item.copy, item.state = None, "fresh"
