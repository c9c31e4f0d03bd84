"""Transfers on the streams of a real CUDA device, with copies and computing held up on purpose."""

from __future__ import annotations

import gc
import pathlib
import random
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from elbowroom.runtime.stream_transfers import StreamTransfers
from elbowroom.runtime.streams import CudaStreams, StreamEvent
from elbowroom.tiers.disk import SpillFile
from elbowroom.tiers.pinned import HostSlabs, SlabBlock
from tests.fake_streams import Pageable, Program, pattern

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NBYTES = 24 << 20
"""Beyond 10 MiB the caching allocator gives a block a segment of its own and hands it out again whole."""
LONG = 100_000_000
"""Cycles: 50 ms or more on any device, against about 2 ms for a copy of `NBYTES`."""


class DelayedStreams(CudaStreams):
    """Holds up every copy by so many cycles, and can forget one kind of edge."""

    def __init__(
        self,
        out_cycles: Callable[[], int] = lambda: 0,
        back_cycles: Callable[[], int] = lambda: 0,
        forgets: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(torch.device("cuda"))
        self._out_cycles, self._back_cycles, self._forgets = out_cycles, back_cycles, forgets
        self._lanes: dict[int, str] = {}
        self._events: list[StreamEvent] = []  # kept, so that no two have the same id

    def _known(self, event: StreamEvent, lane: str) -> StreamEvent:
        self._lanes[id(event)] = lane
        self._events.append(event)
        return event

    def _kept(self, waiter: str, after: Sequence[StreamEvent]) -> list[StreamEvent]:
        return [event for event in after if (waiter, self._lanes[id(event)]) != self._forgets]

    def record_compute(self) -> StreamEvent:
        return self._known(super().record_compute(), "compute")

    def copy_out(
        self, source: torch.UntypedStorage, host: SlabBlock, after: Sequence[StreamEvent], source_offset: int = 0
    ) -> StreamEvent:
        hold_up(self.out_stream, self._out_cycles())
        return self._known(super().copy_out(source, host, self._kept("copy_out", after), source_offset), "out")

    def copy_in(
        self, host: SlabBlock, target: torch.UntypedStorage, after: Sequence[StreamEvent], target_offset: int = 0
    ) -> StreamEvent:
        hold_up(self.back_stream, self._back_cycles())
        return self._known(super().copy_in(host, target, self._kept("copy_in", after), target_offset), "back")

    def compute_waits(self, event: StreamEvent) -> None:
        for kept in self._kept("compute", [event]):
            super().compute_waits(kept)


def hold_up(stream: torch.cuda.Stream, cycles: int) -> None:
    if cycles:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Computing:
    """What a program computes, checked on the device so that the host never waits."""

    def __init__(self, streams: CudaStreams, seed: int = 0, cycles: int = 0) -> None:
        self.streams = streams
        self._random, self._cycles = random.Random(seed), cycles
        self._wrong = torch.zeros((), dtype=torch.int64, device=streams.device)

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        return self.streams.allocate(nbytes)

    def write(self, storage: torch.UntypedStorage, number: int) -> None:
        if self._cycles:
            torch.cuda._sleep(self._random.randrange(1, self._cycles))
        bytes_of(storage).copy_(pattern(number, storage.nbytes(), storage.device))

    def check(self, storage: torch.UntypedStorage, number: int, what: str) -> None:
        self._wrong += (bytes_of(storage) != pattern(number, storage.nbytes(), storage.device)).any()

    def fill(self, storage: torch.UntypedStorage, number: int) -> None:
        """Like `write`, without temporaries that the allocator could place where the test wants a storage."""
        bytes_of(storage).fill_(number)

    def check_filled(self, storage: torch.UntypedStorage, number: int) -> None:
        held = bytes_of(storage)
        self._wrong += (held.min() != number) | (held.max() != number)

    def pause(self) -> None:
        choice = self._random.random()
        if choice < 0.05:
            torch.cuda.synchronize(self.streams.device)
        elif choice < 0.2 and self._cycles:
            torch.cuda._sleep(self._random.randrange(1, self._cycles))

    def wrong(self) -> int:
        """How many checks have failed. Waits for everything."""
        torch.cuda.synchronize(self.streams.device)
        return int(self._wrong.item())


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    # Kernels are loaded on first use, which may wait for the device and would hide a missing edge.
    streams = DelayedStreams()
    computing = Computing(streams)
    storage = computing.allocate(4096)
    computing.write(storage, 1)
    computing.check(storage, 1, "")
    computing.fill(storage, 1)
    computing.check_filled(storage, 1)
    torch.cuda._sleep(1000)
    assert computing.wrong() == 0
    del storage, computing, streams
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    yield
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def cycles_up_to(most: int, seed: int) -> Callable[[], int]:
    generator = random.Random(seed)
    return lambda: generator.choice((0, 0, generator.randint(0, most)))


@pytest.mark.parametrize("spills", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("max_bytes", [9000, 3 << 20])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_back_is_what_left(tmp_path: pathlib.Path, seed: int, max_bytes: int, spills: bool) -> None:
    most = 2_000_000  # about a millisecond
    streams = DelayedStreams(cycles_up_to(most * (seed % 2), seed), cycles_up_to(most, seed + 1))
    host = HostSlabs(4 * max_bytes, max_bytes)
    transfers = StreamTransfers(streams, host, SpillFile(tmp_path) if spills else None, staging_bytes=max_bytes)
    computing = Computing(streams, seed, most if seed % 3 else 0)
    Program(transfers, computing, seed, max_bytes).run(250)
    transfers.close()
    assert computing.wrong() == 0
    assert transfers.reloaded_bytes > 0
    assert host.slab_bytes == host.pinned_bytes == host.block_bytes == 0


# Each edge, and what happens without it -------------------------------------------------------------------------------


def copy_out_waits_for_compute(computing: Computing, transfers: StreamTransfers) -> None:
    storage = computing.allocate(NBYTES)
    computing.fill(storage, 9)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    computing.fill(storage, 1)
    copy = transfers.offload(storage)
    transfers.finish(copy)
    del storage
    back = transfers.reload(copy)
    transfers.finish(copy)
    computing.check_filled(back, 1)
    transfers.discard(copy)


def compute_waits_for_copy_out(computing: Computing, transfers: StreamTransfers) -> None:
    storage = computing.allocate(NBYTES)
    address = storage.data_ptr()
    computing.fill(storage, 1)
    copy = transfers.offload(storage)  # held up
    transfers.finish(copy)
    del storage
    reused = computing.allocate(NBYTES)
    assert reused.data_ptr() == address
    computing.fill(reused, 2)
    back = transfers.reload(copy)
    transfers.finish(copy)
    computing.check_filled(back, 1)
    transfers.discard(copy)


def copy_in_waits_for_compute(computing: Computing, transfers: StreamTransfers) -> None:
    storage = computing.allocate(NBYTES)
    address = storage.data_ptr()
    computing.fill(storage, 1)
    copy = transfers.offload(storage)
    transfers.finish(copy)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    computing.fill(storage, 2)
    del storage
    back = transfers.reload(copy)
    assert back.data_ptr() == address
    transfers.finish(copy)
    computing.check_filled(back, 1)
    transfers.discard(copy)


def copy_in_waits_for_copy_out(computing: Computing, transfers: StreamTransfers) -> None:
    storage = computing.allocate(NBYTES)
    computing.fill(storage, 1)
    copy = transfers.offload(storage)  # held up
    back = transfers.reload(copy)
    transfers.finish(copy)
    computing.check_filled(back, 1)
    transfers.discard(copy)


def compute_waits_for_copy_in(computing: Computing, transfers: StreamTransfers) -> None:
    storage = computing.allocate(NBYTES)
    computing.fill(storage, 1)
    copy = transfers.offload(storage)
    transfers.finish(copy)
    computing.fill(storage, 2)  # so that the memory does not hold the right bytes by chance
    del storage
    torch.cuda.synchronize()
    back = transfers.reload(copy)  # held up
    transfers.finish(copy)
    computing.check_filled(back, 1)
    transfers.discard(copy)


def copy_out_waits_for_copy_in(computing: Computing, transfers: StreamTransfers) -> None:
    first, second = computing.allocate(NBYTES), computing.allocate(NBYTES)
    computing.fill(first, 1)
    computing.fill(second, 2)
    copy = transfers.offload(first)
    transfers.finish(copy)
    torch.cuda.synchronize()
    back = transfers.reload(copy)  # held up
    transfers.discard(copy)
    other = transfers.offload(second)  # there is only this one block of host memory
    transfers.finish(copy)
    computing.check_filled(back, 1)
    transfers.finish(other)
    transfers.discard(other)


@pytest.mark.parametrize("is_forgotten", [False, True], ids=["with the edge", "without the edge"])
@pytest.mark.parametrize(
    ("scenario", "edge", "late"),
    [
        (copy_out_waits_for_compute, ("copy_out", "compute"), ""),
        (compute_waits_for_copy_out, ("compute", "out"), "out"),
        (copy_in_waits_for_compute, ("copy_in", "compute"), ""),
        (copy_in_waits_for_copy_out, ("copy_in", "out"), "out"),
        (compute_waits_for_copy_in, ("compute", "back"), "back"),
        (copy_out_waits_for_copy_in, ("copy_out", "back"), "back"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_each_edge_is_needed(
    scenario: Callable[[Computing, StreamTransfers], None], edge: tuple[str, str], late: str, is_forgotten: bool
) -> None:
    streams = DelayedStreams(
        lambda: LONG if late == "out" else 0, lambda: LONG if late == "back" else 0, edge if is_forgotten else None
    )
    host = HostSlabs(NBYTES, NBYTES)
    host.free(host.reserve(NBYTES))  # pinning may wait for the device
    transfers = StreamTransfers(streams, host)
    computing = Computing(streams)
    scenario(computing, transfers)
    transfers.close()
    assert (computing.wrong() > 0) == is_forgotten


# Streams --------------------------------------------------------------------------------------------------------------


def test_the_host_does_not_wait() -> None:
    streams = DelayedStreams(lambda: 4 * LONG, lambda: 4 * LONG)
    host = HostSlabs(NBYTES, NBYTES)
    host.free(host.reserve(NBYTES))
    transfers = StreamTransfers(streams, host)
    computing = Computing(streams)
    storage = computing.allocate(NBYTES)
    spare = computing.allocate(NBYTES)  # `cudaMalloc` may wait: let the reload find memory in the cache
    del spare
    computing.fill(storage, 1)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    copy = transfers.offload(storage)
    transfers.finish(copy)
    back = transfers.reload(copy)
    transfers.finish(copy)
    computing.check_filled(back, 1)
    issued_seconds = time.perf_counter() - begin
    assert copy.last is not None and not copy.last.is_done()
    assert computing.wrong() == 0
    whole_seconds = time.perf_counter() - begin
    assert copy.last.is_done()
    assert issued_seconds < whole_seconds / 4
    assert transfers.stall_seconds == 0.0
    transfers.discard(copy)
    transfers.close()


def test_the_program_may_compute_on_a_stream_of_its_own() -> None:
    streams = DelayedStreams(lambda: LONG // 10, lambda: LONG // 10)
    transfers = StreamTransfers(streams, HostSlabs(NBYTES, NBYTES))
    computing = Computing(streams)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        storage = computing.allocate(NBYTES)
        torch.cuda._sleep(LONG)
        computing.fill(storage, 1)
        copy = transfers.offload(storage)
        transfers.finish(copy)
        del storage
        reused = computing.allocate(NBYTES)
        computing.fill(reused, 2)
        back = transfers.reload(copy)
        transfers.finish(copy)
        computing.check_filled(back, 1)
        transfers.discard(copy)
        assert computing.wrong() == 0
        del reused, back
    transfers.close()


def test_finishing_on_another_stream_protects_the_owner_of_the_memory() -> None:
    streams = DelayedStreams(lambda: LONG)
    transfers = StreamTransfers(streams, HostSlabs(NBYTES, NBYTES))
    computing = Computing(streams)
    storage = computing.allocate(NBYTES)
    address = storage.data_ptr()
    computing.fill(storage, 1)
    copy = transfers.offload(storage)
    with torch.cuda.stream(torch.cuda.Stream()):
        transfers.finish(copy)
    del storage
    reused = computing.allocate(NBYTES)
    assert reused.data_ptr() == address
    computing.fill(reused, 2)
    back = transfers.reload(copy)
    transfers.finish(copy)
    computing.check_filled(back, 1)
    assert computing.wrong() == 0
    transfers.discard(copy)
    transfers.close()


def test_inference_mode_and_a_default_device_change_nothing() -> None:
    streams = CudaStreams(torch.device("cuda"))
    transfers = StreamTransfers(streams, HostSlabs(1 << 20, 1 << 20))
    computing = Computing(streams)
    storage = computing.allocate(1000)
    computing.write(storage, 1)
    with torch.inference_mode(), torch.device("cuda"):
        copy = transfers.offload(storage)
    back = transfers.reload(copy)
    transfers.finish(copy)
    computing.check(back, 1, "")
    assert computing.wrong() == 0
    transfers.discard(copy)
    transfers.close()


@pytest.mark.parametrize("late", [0, LONG // 10])
def test_pageable_memory_works_too(late: int) -> None:
    streams = DelayedStreams(lambda: late, lambda: late)
    transfers = StreamTransfers(streams, HostSlabs(8 << 20, 1 << 20, pinning=Pageable()))
    computing = Computing(streams, cycles=late)
    storage = computing.allocate(900_000)
    computing.write(storage, 1)
    copy = transfers.offload(storage)
    back = transfers.reload(copy)
    transfers.finish(copy)
    computing.check(back, 1, "")
    assert computing.wrong() == 0
    transfers.discard(copy)
    transfers.close()
