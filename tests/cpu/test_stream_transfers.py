"""Transfers on streams, on a fake device that runs everything as late, as early or as randomly as events allow."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elbowroom.cost.transfers import count_least_host_bytes
from elbowroom.errors import InternalError, TierFull, TransferFailed, UsageError
from elbowroom.runtime.factory import open_spill_behind
from elbowroom.runtime.stream_transfers import StreamCopy, StreamTransfers
from elbowroom.runtime.transfers import Copy
from elbowroom.tiers.disk import SpillFile
from elbowroom.tiers.pinned import HostSlabs
from tests.fake_streams import SCHEDULES, FakeStreams, ForgetfulStreams, Program

HOST_BYTES = 24 << 10
"""Small enough that the program's storages, of up to 9000 bytes, often find it full."""


def make_transfers(
    streams: FakeStreams, folder: pathlib.Path | None = None, kind: type[StreamTransfers] = StreamTransfers
) -> StreamTransfers:
    host = HostSlabs(HOST_BYTES, 8 << 10, pinning=streams)
    spill = SpillFile(folder) if folder is not None else None
    return kind(streams, host, spill, staging_bytes=3000)


def fill_host(transfers: StreamTransfers) -> None:
    """Leave no room in host memory, so that everything spills."""
    for nbytes in (4096, 512):
        with contextlib.suppress(TierFull):
            while True:
                transfers._blocks._host.reserve(nbytes)


def run_program(
    streams: FakeStreams, seed: int, folder: pathlib.Path | None, kind: type[StreamTransfers] = StreamTransfers
) -> tuple[StreamTransfers, Program]:
    transfers = make_transfers(streams, folder, kind)
    program = Program(transfers, streams, seed)
    program.run(120)
    transfers.close()
    streams.drain()
    return transfers, program


def goes_wrong(
    forgets: tuple[str, str] | None,
    folder: pathlib.Path | None,
    kind: type[StreamTransfers] = StreamTransfers,
    seeds: int = 40,
) -> bool:
    """Whether one of some runs ends with a violation."""
    for seed in range(seeds):
        for schedule in SCHEDULES:
            streams = ForgetfulStreams(seed, schedule, forgets) if forgets else FakeStreams(seed, schedule)
            run_program(streams, seed, folder, kind)
            if streams.violations:
                return True
    return False


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), schedule=st.sampled_from(sorted(SCHEDULES)), spills=st.booleans())
def test_whatever_comes_back_is_what_left(
    seed: int, schedule: str, spills: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() if spills else None
    streams = FakeStreams(seed, schedule)
    transfers, program = run_program(streams, seed, folder)
    assert streams.violations == []
    assert spills <= (program.refusals == 0)
    # Nothing stays behind.
    gc.collect()
    assert streams.live_bytes == 0
    assert streams.pinned == {}
    host = transfers._blocks._host
    assert host.slab_bytes == host.pinned_bytes == host.block_bytes == 0


@pytest.mark.parametrize("folder", [None, "disk"])
def test_nothing_goes_wrong_with_every_edge_there(tmp_path: pathlib.Path, folder: str | None) -> None:
    # The first of the very runs in which each dropped edge is found below.
    assert not goes_wrong(None, tmp_path if folder else None, seeds=12)


@pytest.mark.parametrize(
    "forgets",
    [
        ("copy_out", "compute"),  # what is copied out may not be computed yet
        ("copy_out", "back"),  # the host block may still be read by the copy back of its last owner
        ("copy_in", "compute"),  # the target's memory may still be used by its last owner
        ("copy_in", "out"),  # the copy back may overtake its own copy out
        ("compute", "out"),  # the source may be overwritten before it is copied out
        ("compute", "back"),  # the target may be used before it is there
        ("host", "out"),  # slabs may be given back under a copy out
        ("host", "back"),  # slabs may be given back under a copy back
    ],
)
def test_each_edge_is_needed(forgets: tuple[str, str]) -> None:
    assert goes_wrong(forgets, None)


@pytest.mark.parametrize(
    "forgets",
    [
        ("copy_out", "compute"),
        ("copy_out", "back"),  # also: a half of the staging memory may still be copied back from
        ("copy_in", "compute"),
        ("copy_in", "out"),
        ("compute", "out"),
        ("compute", "back"),
        ("host", "out"),  # also: what is written to the disk may not have left the device
        ("host", "back"),  # also: what is read from the disk may overwrite what is on its way
    ],
)
def test_each_edge_is_needed_on_the_way_to_the_disk(forgets: tuple[str, str], tmp_path: pathlib.Path) -> None:
    assert goes_wrong(forgets, tmp_path)


class DropsStorages(StreamTransfers):
    def discard(self, copy: Copy) -> None:
        assert isinstance(copy, StreamCopy)
        for unfinished in copy.moving:
            unfinished.storage = None
        super().discard(copy)


class ForgetsUsers(StreamTransfers):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_flight.list_users = lambda block: []  # type: ignore[method-assign]


class RecordsTooEarly(StreamTransfers):
    """Records the compute lane before it allocates the target."""

    def reload(self, copy: Copy, misalignment: int = 0) -> torch.UntypedStorage:
        early = self.streams.record_compute()
        record, self.streams.record_compute = self.streams.record_compute, lambda: early  # type: ignore[method-assign]
        try:
            return super().reload(copy, misalignment)
        finally:
            self.streams.record_compute = record  # type: ignore[method-assign]


class ReleasesBeforeWaiting(StreamTransfers):
    def finish(self, copy: Copy) -> None:
        assert isinstance(copy, StreamCopy)
        last, copy.last = copy.last, None
        super().finish(copy)
        copy.last = last


class StopsAtOnce(StreamTransfers):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._in_flight.wait = self._in_flight._unfinished.clear  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [DropsStorages, ForgetsUsers, RecordsTooEarly, ReleasesBeforeWaiting, StopsAtOnce])
def test_each_precaution_is_needed(kind: type[StreamTransfers]) -> None:
    assert goes_wrong(None, None, kind)


@pytest.mark.parametrize("half", ["before copying out", "before reading back", "before closing"])
def test_a_half_of_the_staging_memory_is_not_reused_early(tmp_path: pathlib.Path, half: str) -> None:
    streams = FakeStreams(schedule="copies late")
    transfers = make_transfers(streams, tmp_path)
    fill_host(transfers)
    first, second = streams.allocate(5000), streams.allocate(6000)
    streams.write(first, 1)
    streams.write(second, 2)
    copy = transfers.offload(first)
    assert copy.block is None
    transfers.finish(copy)
    back = transfers.reload(copy)  # its last two pieces are still on their way now
    if half == "before copying out":
        other = transfers.offload(second)
        transfers.discard(other)
    elif half == "before reading back":
        transfers.finish(copy)
        back = transfers.reload(copy)
    transfers.finish(copy)
    streams.check(back, 1, "what was reloaded")
    transfers.discard(copy)
    transfers.close()
    assert streams.violations == []
    streams.drain()
    assert streams.violations == []


def test_a_reload_may_come_before_the_offload_has_ended() -> None:
    streams = FakeStreams(schedule="copies back early")
    transfers = make_transfers(streams)
    storage = streams.allocate(4000)
    streams.write(storage, 5)
    copy = transfers.offload(storage)
    back = transfers.reload(copy)
    transfers.finish(copy)
    del storage
    streams.check(back, 5, "the storage")
    streams.drain()
    assert streams.violations == []


def test_the_host_never_waits_while_host_memory_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = FakeStreams()
    monkeypatch.setattr(streams, "host_waits", lambda event: pytest.fail("the host waited"))
    transfers = make_transfers(streams)
    for _ in range(3):
        storage = streams.allocate(4000)
        copy = transfers.offload(storage)
        transfers.finish(copy)
        del storage
        transfers.reload(copy)
        transfers.finish(copy)
        transfers.discard(copy)
    assert transfers.stall_seconds == 0.0
    assert transfers.offloaded_bytes == transfers.reloaded_bytes == 12000


def test_an_empty_storage_makes_the_round_trip(tmp_path: pathlib.Path) -> None:
    for full in (False, True):
        streams = FakeStreams()
        transfers = make_transfers(streams, tmp_path)
        if full:
            fill_host(transfers)
        copy = transfers.offload(streams.allocate(0))
        transfers.finish(copy)
        assert transfers.reload(copy).nbytes() == 0
        transfers.finish(copy)
        transfers.discard(copy)
        transfers.close()


def test_a_full_host_refuses_and_says_what_to_do() -> None:
    streams = FakeStreams()
    transfers = make_transfers(streams)
    storage = streams.allocate(8000)
    copies = [transfers.offload(storage) for _ in range(3)]
    with pytest.raises(TierFull, match="host_bytes=") as caught:
        transfers.offload(storage)
    assert caught.value.needed_bytes == 8000
    assert transfers.offloaded_bytes == 24000
    transfers.discard(copies.pop())
    copies.append(transfers.offload(storage))  # there is room again
    for copy in copies:
        transfers.finish(copy)
        transfers.discard(copy)
    transfers.close()
    streams.drain()
    assert streams.pinned == {}


def test_slabs_of_the_wrong_size_make_way() -> None:
    streams = FakeStreams(schedule="copies late")
    transfers = make_transfers(streams)
    small = streams.allocate(8000)
    for copy in [transfers.offload(small) for _ in range(3)]:
        transfers.discard(copy)
    large = streams.allocate(20000)
    streams.write(large, 9)
    copy = transfers.offload(large)
    assert streams.violations == []
    transfers.finish(copy)
    transfers.discard(copy)
    transfers.close()


def test_a_full_disk_refuses(tmp_path: pathlib.Path) -> None:
    streams = FakeStreams()
    transfers = StreamTransfers(
        streams, HostSlabs(16384, 16384, pinning=streams), SpillFile(tmp_path, 8192), staging_bytes=4096
    )
    storage = streams.allocate(8000)
    copies = [transfers.offload(storage), transfers.offload(storage)]
    assert [copy.block is None for copy in copies] == [False, True]
    with pytest.raises(TierFull, match="spill file"):
        transfers.offload(storage)
    for copy in copies:
        transfers.discard(copy)
    transfers.close()


@pytest.mark.parametrize("way", ["out", "back"])
def test_a_failing_disk_is_reported_on_finish(
    tmp_path: pathlib.Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(28, "No space left on device")

    streams = FakeStreams(schedule="copies late")
    transfers = make_transfers(streams, tmp_path)
    fill_host(transfers)
    storage = streams.allocate(8000)
    streams.write(storage, 3)
    if way == "out":
        monkeypatch.setattr(os, "pwrite", fail)
        copy = transfers.offload(storage)
    else:
        copy = transfers.offload(storage)
        transfers.finish(copy)
        monkeypatch.setattr(os, "preadv", fail)
        transfers.reload(copy)
    with pytest.raises(TransferFailed, match="No space left"):
        transfers.finish(copy)
    monkeypatch.undo()
    streams.check(storage, 3, "the source")
    transfers.discard(copy)
    transfers.close()
    streams.drain()
    assert streams.violations == []
    assert streams.pinned == {}


def test_no_room_on_the_device_is_a_failed_transfer() -> None:
    streams = FakeStreams(capacity_bytes=8192)
    transfers = make_transfers(streams)
    storage = streams.allocate(8000)
    streams.write(storage, 4)
    copy = transfers.offload(storage)
    transfers.finish(copy)
    with pytest.raises(TransferFailed):
        transfers.reload(copy)
    del storage
    back = transfers.reload(copy)  # the copy is still good
    transfers.finish(copy)
    streams.check(back, 4, "the storage")
    streams.drain()
    assert streams.violations == []


def test_closing_waits_for_the_last_copy(tmp_path: pathlib.Path) -> None:
    streams = FakeStreams()
    transfers = make_transfers(streams, tmp_path)
    storage = streams.allocate(4000)
    streams.write(storage, 6)
    copy = transfers.offload(storage)
    transfers.close()
    assert streams.pinned != {}
    back = transfers.reload(copy)
    transfers.finish(copy)
    streams.check(back, 6, "the storage")
    transfers.discard(copy)
    assert streams.pinned == {}
    transfers.close()
    streams.drain()
    assert streams.violations == []
    with pytest.raises(InternalError):
        transfers.offload(storage)


def test_only_storages_of_the_right_device_are_moved() -> None:
    transfers = make_transfers(FakeStreams())
    with pytest.raises(UsageError, match="meta"):
        transfers.offload(torch.empty(8, device="meta").untyped_storage())
    assert transfers.offloaded_bytes == 0


def test_no_copy_goes_to_the_disk_through_too_little_host_memory(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    least_bytes = count_least_host_bytes()
    assert open_spill_behind(least_bytes - 1, str(tmp_path)) is None
    assert "2.0 MiB of host memory, and host_bytes=2097151 allows less" in caplog.text
    streams = FakeStreams(0)
    transfers = StreamTransfers(streams, HostSlabs(0, pinning=streams), open_spill_behind(0, str(tmp_path)))
    with pytest.raises(TierFull):
        transfers.offload(torch.zeros(100).untyped_storage())
    transfers.close()
    spill = open_spill_behind(least_bytes, str(tmp_path))
    transfers = StreamTransfers(streams, HostSlabs(least_bytes, pinning=streams), spill)
    source = streams.allocate(1 << 16)
    streams.write(source, 1)
    copy = transfers.offload(source)
    assert copy.block is None and transfers._staging is not None
    assert transfers._staging.piece_bytes == least_bytes // 2
    back = transfers.reload(copy)
    transfers.finish(copy)
    streams.check(back, 1, "what was reloaded")
    transfers.discard(copy)
    transfers.close()
    streams.drain()
    assert streams.violations == []
