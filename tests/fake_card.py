"""A card on a CPU, for whole rooms: its allocator refuses as CUDA's does, its copies run on streams of their own, and
its backward passes in a thread of their own, for which the thread of the step waits.

Ops compute at once. A copy runs as late as the events allow, or at once, or at random: so memory that is written or
given away before a copy is ordered with it has wrong contents afterwards.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from elbowroom.errors import DeviceFull
from elbowroom.hooks.storage_ids import get_address
from elbowroom.native import library
from elbowroom.runtime.compute_streams import StreamNumbers
from elbowroom.runtime.factory import open_spill_behind
from elbowroom.runtime.stream_transfers import StreamTransfers
from elbowroom.runtime.streams import StreamEvent
from elbowroom.tiers.pinned import HostSlabs, SlabBlock
from tests.device_ledger import DeviceLedger, use_device_ledger
from tests.fake_streams import FakeEvent, Pageable

HOST_BYTES = 1 << 32


class RoomStreams:
    """Implements `Streams` beside ops that compute on the host.

    Args:
        schedule: "late", "early" or "random".
    """

    def __init__(self, schedule: str) -> None:
        self.device = torch.device("cpu")
        self._schedule = schedule
        self._random = random.Random(0)
        self._lanes: dict[str, deque[tuple[Callable[[], object], list[FakeEvent], FakeEvent]]] = {
            "out": deque(), "back": deque(),
        }  # fmt: skip

    def record_compute(self) -> FakeEvent:
        event = FakeEvent("compute")
        event.done = True
        return event

    def copy_out(
        self, source: torch.UntypedStorage, host: SlabBlock, after: Sequence[StreamEvent], source_offset: int = 0
    ) -> FakeEvent:
        return self._enqueue(
            "out", lambda: _copy(get_address(source) + source_offset, host.address, host.nbytes), after
        )

    def copy_in(
        self, host: SlabBlock, target: torch.UntypedStorage, after: Sequence[StreamEvent], target_offset: int = 0
    ) -> FakeEvent:
        return self._enqueue(
            "back", lambda: _copy(host.address, get_address(target) + target_offset, host.nbytes), after
        )

    def compute_waits(self, event: StreamEvent) -> None:
        self.host_waits(event)  # ops compute on the host

    def note_computing(self, stream: StreamNumbers) -> None:
        pass

    def meet(self) -> None:
        pass

    def host_waits(self, event: StreamEvent) -> None:
        assert isinstance(event, FakeEvent)
        self._run_until(event)

    def host_waits_for_copies(self) -> None:
        for lane in self._lanes.values():
            if lane:
                self._run_until(lane[-1][2])

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        try:
            return torch.full((nbytes,), 0xCB, dtype=torch.uint8).untyped_storage()
        except torch.OutOfMemoryError as error:
            raise DeviceFull(f"no room to reload {nbytes} bytes") from error

    def _enqueue(self, lane: str, copy: Callable[[], object], after: Sequence[StreamEvent]) -> FakeEvent:
        event = FakeEvent(lane)
        self._lanes[lane].append((copy, [each for each in after if isinstance(each, FakeEvent)], event))
        if self._schedule == "early" or (self._schedule == "random" and self._random.random() < 0.5):
            self._run_until(event)
        return event

    def _run_until(self, event: FakeEvent) -> None:
        lane = self._lanes.get(event.lane, ())
        while not event.done:
            copy, after, ended = lane.popleft()  # type: ignore[union-attr]
            for each in after:
                self._run_until(each)
            copy()
            ended.done = True


def _copy(source: int, target: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)  # an op of PyTorch would be part of the step


def _allocate_host(nbytes: int) -> torch.Tensor:
    """Allocate host memory, which the allocator of the card does not count."""
    with torch.inference_mode(False):
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def use_fake_card(monkeypatch: pytest.MonkeyPatch, schedule: str = "late") -> list[DeviceLedger]:
    """Let rooms on the CPU count and move as on a card. Returns their ledgers, the latest last."""

    def open_transfers(device: torch.device, spill_folder: str | None, host_bytes: int | None) -> StreamTransfers:
        host = HostSlabs(HOST_BYTES if host_bytes is None else host_bytes, pinning=Pageable())
        return StreamTransfers(RoomStreams(schedule), host, open_spill_behind(host.capacity_bytes, spill_folder))

    monkeypatch.setattr("elbowroom.room.open_transfers", open_transfers)
    monkeypatch.setattr("elbowroom.tiers.pinned._new_memory", _allocate_host)
    ledgers = use_device_ledger(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "backward", _run_in_thread(torch.Tensor.backward, ledgers))
    return ledgers


def _run_in_thread(backward: Callable[..., None], ledgers: list[DeviceLedger]) -> Callable[..., None]:
    """Return a function that runs a backward pass in another thread, with the watchers of this one."""

    def run(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
        native = library.load()
        watchers = native.get_watchers()
        if not watchers:
            backward(tensor, *args, **options)
            return
        errors: list[BaseException] = []

        def run_here() -> None:
            before = native.enter_scope(ledgers[-1].memory.scope)
            native.set_watchers(watchers)
            try:
                backward(tensor, *args, **options)
            except BaseException as error:
                errors.append(error)
            finally:
                native.set_watchers(())
                native.enter_scope(before)

        thread = threading.Thread(target=run_here)
        thread.start()
        thread.join()
        if errors:
            raise errors.pop()

    return run
