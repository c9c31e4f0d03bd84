"""Tiers that are told where a copy was planned to lie: granted, refused, elsewhere instead, and given back."""

from __future__ import annotations

import ctypes
import errno
import os
import pathlib
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

import elbowroom
from elbowroom.errors import TierFull
from elbowroom.ir.hardware import HardwareProfile
from elbowroom.ir.journal import Mode
from elbowroom.ir.placement import CopySlot, Placement
from elbowroom.room import Room
from elbowroom.runtime.stream_transfers import StreamCopy, StreamTransfers
from elbowroom.runtime.streams import StreamEvent
from elbowroom.runtime.transfers import SpillCopy, ThreadTransfers
from elbowroom.tiers import pinned
from elbowroom.tiers.disk import SpillFile
from elbowroom.tiers.pinned import HostSlabs, SlabBlock
from tests.fake_streams import SCHEDULES, FakeEvent, FakeStreams, Pageable, Program, pattern

pytestmark = pytest.mark.usefixtures("activations_only")

MOST_OVER = 1.02
KIB = 1024


def settle() -> None:
    """Nothing is under way."""


# Blocks hold what was put into them -----------------------------------------------------------------------------------

plans = some.lists(some.integers(0, 40).map(lambda count: 512 * count), min_size=1, max_size=8)
seeds = some.integers(0, 1 << 30)


def fill(number: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(bytes(pattern(number, nbytes).numpy()), nbytes)


@settings(max_examples=25)
@given(seed=seeds, planned=plans)
def test_blocks_of_a_spill_file_never_meet(
    seed: int, planned: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    chance = random.Random(seed)
    spill = SpillFile(tmp_path_factory.getbasetemp(), chance.choice((None, 30_000)))
    held: dict[int, tuple[int, int]] = {}  # offset -> number, bytes
    for number in range(60):
        choice = chance.random()
        if choice < 0.5:
            nbytes, at = chance.randrange(1, 4000), chance.choice((None, *planned))
            try:
                offset = spill.reserve(nbytes, at)
            except TierFull:
                continue
            held[offset] = number, nbytes
            contents = fill(number, nbytes)
            spill.write(offset, ctypes.addressof(contents), nbytes)
        elif choice < 0.9 and held:
            offset = chance.choice(sorted(held))
            spill.free(offset, held.pop(offset)[1])
        else:
            spill.prepare(chance.choice((0, *planned)), gives_back=chance.random() < 0.7)
        for offset, (written, nbytes) in held.items():
            found = ctypes.create_string_buffer(nbytes)
            spill.read(offset, ctypes.addressof(found), nbytes)
            assert found.raw == fill(written, nbytes).raw
    spill.close()


@settings(max_examples=25)
@given(seed=seeds, planned=plans)
def test_blocks_of_slabs_never_meet(seed: int, planned: list[int]) -> None:
    chance = random.Random(seed)
    host = HostSlabs(chance.choice((40_000, 1 << 20)), 8192, pinning=Pageable())
    apart = host.reserve_apart(2000)
    held: list[tuple[int, SlabBlock]] = [(99, apart)]
    apart.tensor.copy_(pattern(99, 2000))
    for number in range(60):
        choice = chance.random()
        if choice < 0.5:
            try:
                block = host.reserve(chance.randrange(1, 4000), chance.choice((None, *planned)))
            except TierFull:
                continue
            block.tensor.copy_(pattern(number, block.nbytes))
            held.append((number, block))
        elif choice < 0.9 and len(held) > 1:
            host.free(held.pop(chance.randrange(1, len(held)))[1])
        else:
            host.prepare(chance.choice((0, *planned)), gives_back=chance.random() < 0.7, settle=settle)
        assert host.block_bytes <= host.slab_bytes <= host.capacity_bytes
        for written, block in held:
            assert torch.equal(block.tensor, pattern(written, block.nbytes))
    host.close()


# The spill file -------------------------------------------------------------------------------------------------------


def test_a_planned_offset_is_granted_and_what_is_in_the_way_costs_room_alone(tmp_path: pathlib.Path) -> None:
    spill = SpillFile(tmp_path)
    spill.prepare(10_000, gives_back=True)
    assert spill.reserve(1000, 4096) == 4096
    assert spill.reserve(1000, 4608) == 10_240  # beyond what is planned, in nobody's way
    assert spill.reserve(1000) == 0  # nobody planned this one
    spill.free(4096, 1000)
    assert spill.reserve(1000, 4608) == 4608
    spill.close()


def test_within_a_capacity_a_hole_is_better_than_nothing(tmp_path: pathlib.Path) -> None:
    spill = SpillFile(tmp_path, 10_240)
    spill.prepare(10_000, gives_back=True)
    assert [spill.reserve(1000, 4096), spill.reserve(1000, 4096)] == [4096, 0]
    with pytest.raises(TierFull):
        spill.reserve(9000, 512)
    spill.close()


def test_a_disk_that_is_full_below_a_planned_offset_may_have_room(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill, allocate = SpillFile(tmp_path), os.posix_fallocate

    def at_most(file: int, begin: int, nbytes: int) -> None:
        if begin + nbytes > 8192:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(file, begin, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", at_most)
    assert spill.reserve(4096, 20_480) == 0
    assert spill.reserve(4096, 4096) == 4096
    with pytest.raises(TierFull, match="disk space"):
        spill.reserve(4096, 20_480)
    spill.close()


def test_a_spill_file_gives_back_what_the_plan_does_not_need(tmp_path: pathlib.Path) -> None:
    spill = SpillFile(tmp_path)

    def size() -> int:
        assert os.fstat(spill._file.fileno()).st_size == spill.file_bytes
        return spill.file_bytes

    assert spill.reserve(100_000) == 0
    spill.free(0, 100_000)
    spill.prepare(8192, gives_back=False)
    assert size() == 100_000
    spill.prepare(8192, gives_back=True)
    assert size() == 100_000  # it was in use just now, and may be again
    kept = spill.reserve(8192, 0)
    spill.prepare(8192, gives_back=True)
    assert size() == 8192
    beyond = spill.reserve(8192, 0)  # where something is in the way each time, nothing is given back each time
    spill.free(beyond, 8192)
    spill.prepare(8192, gives_back=True)
    assert (beyond, size()) == (8192, 16384)
    spill.free(kept, 8192)
    spill.prepare(0, gives_back=True)
    spill.prepare(0, gives_back=True)
    assert size() == 0
    assert spill.reserve(512) == 0
    spill.close()


# Slabs ----------------------------------------------------------------------------------------------------------------


def test_a_planned_step_has_one_slab_of_its_size() -> None:
    streams = FakeStreams()
    host = HostSlabs(1 << 20, 100_000, pinning=streams)
    chunk = host.reserve(70_000)
    host.prepare(200_000, gives_back=True, settle=settle)
    assert len(streams.pinned) == 1  # a copy lives on: another time
    host.free(chunk)
    host.prepare(200_000, gives_back=True, settle=settle)
    assert list(streams.pinned.values()) == [200_192] == [host.slab_bytes]
    blocks = [host.reserve(90_000, 512), host.reserve(50_000, 100_352)]
    assert [block.offset for block in blocks] == [512, 100_352]
    address = next(iter(streams.pinned))
    elsewhere = host.reserve(90_000, 1024)
    assert elsewhere.slab is not blocks[0].slab and len(streams.pinned) == 2
    for block in (*blocks, elsewhere):
        host.free(block)
    host.prepare(199_000, gives_back=True, settle=settle)  # so little less is worth nothing
    assert address in streams.pinned and len(streams.pinned) == 2  # and the other was in use just now
    host.prepare(200_000, gives_back=True, settle=settle)
    assert list(streams.pinned) == [address]
    host.prepare(50_000, gives_back=False, settle=settle)
    assert list(streams.pinned) == [address]
    host.prepare(50_000, gives_back=True, settle=settle)
    assert list(streams.pinned.values()) == [50_176]
    host.prepare(0, gives_back=True, settle=settle)
    assert streams.pinned == {} and host.slab_bytes == host.pinned_bytes == 0


def test_a_plan_that_is_too_large_has_all_there_is() -> None:
    host = HostSlabs(100_352, pinning=Pageable())
    apart = host.reserve_apart(10_000)
    host.prepare(200_000, gives_back=True, settle=settle)
    assert host.slab_bytes == 100_352
    assert host.reserve(20_000, 1024).offset == 1024
    assert host.reserve(20_000, 99_840).offset == 21_504  # beyond its end: where there is room
    with pytest.raises(TierFull):
        host.reserve(90_000, 0)
    assert apart.tensor.numel() == 10_000


def test_what_the_system_refuses_comes_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostSlabs(1 << 61, 4096, pinning=Pageable())
    host.prepare(1 << 60, gives_back=True, settle=settle)
    assert host.slab_bytes == 0
    assert host.reserve(1000, 1 << 59).offset == 0


def test_what_may_not_be_pinned_in_one_piece_is_pinned_in_chunks() -> None:
    class Limited(Pageable):
        asked = 0

        def pin(self, address: int, nbytes: int) -> bool:
            self.asked += 1
            return nbytes <= 4096

    pinning = Limited()
    host = HostSlabs(1 << 20, 4096, pinning=pinning)
    for _ in range(3):
        host.prepare(100_000, gives_back=True, settle=settle)
    assert host.slab_bytes == 0 and pinning.asked == 1
    block = host.reserve(3000, 512)
    assert host.pinned_bytes == host.slab_bytes == 4096 and block.offset == 0


# Transfers ------------------------------------------------------------------------------------------------------------


class Planned(StreamTransfers):
    """Asks for berths at random, and prepares for other plans from time to time."""

    chance = random.Random(0)

    def offload(self, storage: torch.UntypedStorage, copy_slot: CopySlot | None = None) -> StreamCopy:
        if self.chance.random() < 0.2:
            most = self.chance.choice((0, 4096, 12_288, 24_576))
            self.prepare(Placement(lower_bytes=most, disk_bytes=most), gives_back=self.chance.random() < 0.7)
        copy_slot = CopySlot(
            storage=0, begin=0, end=1, nbytes=storage.nbytes(), offset=512 * self.chance.randrange(40),
            is_on_disk=self.chance.random() < 0.2,
        )  # fmt: skip
        return super().offload(storage, copy_slot if self.chance.random() < 0.8 else None)


class ForgetsToSettle(Planned):
    """Gives slabs back under what still runs in them."""

    def prepare(self, placement: Placement, *, gives_back: bool) -> None:
        self._blocks._host.prepare(placement.lower_bytes, gives_back=gives_back, settle=settle)


def run_programs(kind: type[Planned], folder: pathlib.Path | None, seeds: int) -> list[str]:
    found = []
    for seed in range(seeds):
        for schedule in SCHEDULES:
            streams = FakeStreams(seed, schedule)
            kind.chance = random.Random(seed)
            host = HostSlabs(24 * KIB, 8 * KIB, pinning=streams)
            transfers = kind(streams, host, SpillFile(folder) if folder else None, staging_bytes=3000)
            Program(transfers, streams, seed).run(120)
            transfers.close()
            streams.drain()
            found += streams.violations
            assert streams.pinned == {} and host.block_bytes <= 3072
    return found


@pytest.mark.parametrize("spills", [False, True])
def test_whatever_was_planned_comes_back_as_it_left(spills: bool, tmp_path: pathlib.Path) -> None:
    assert run_programs(Planned, tmp_path if spills else None, 6) == []


def test_a_slab_is_not_given_back_under_a_transfer() -> None:
    assert "host memory was given back under a transfer" in run_programs(ForgetsToSettle, None, 20)


def test_what_the_plan_has_on_the_disk_goes_there_at_once(tmp_path: pathlib.Path) -> None:
    streams = FakeStreams()
    transfers = StreamTransfers(streams, HostSlabs(64 * KIB, pinning=streams), SpillFile(tmp_path), staging_bytes=4096)
    transfers.prepare(Placement(lower_bytes=8192, disk_bytes=8192), gives_back=True)
    storage = streams.allocate(4000)
    copy_slots = [
        CopySlot(storage=0, begin=0, end=9, nbytes=4000, offset=1024, is_on_disk=place) for place in (False, True)
    ]
    host, disk = (transfers.offload(storage, copy_slot) for copy_slot in copy_slots)
    assert host.block is not None and host.block.offset == 1024
    assert disk.block is None and disk.offset == 1024
    for copy in (host, disk):
        transfers.discard(copy)
    transfers.close()


@pytest.mark.parametrize(("planned_bytes", "pieces"), [(None, 2), (1000, 4), (1 << 20, 2)])
def test_what_passes_to_the_disk_does_so_in_pieces_of_the_planned_size(
    planned_bytes: int | None, pieces: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, written = FakeStreams(), list[int]()
    spill = SpillFile(tmp_path)
    write = spill.write
    monkeypatch.setattr(spill, "write", lambda at, *rest: (written.append(at), write(at, *rest)))
    transfers = StreamTransfers(streams, HostSlabs(64 * KIB, pinning=streams), spill, staging_bytes=4096)
    transfers.prepare(Placement(disk_bytes=4096, piece_bytes=planned_bytes), gives_back=True)
    storage = streams.allocate(4000)
    streams.write(storage, 7)
    copy = transfers.offload(storage, CopySlot(storage=0, begin=0, end=9, nbytes=4000, is_on_disk=True))
    assert len(written) == pieces
    transfers.finish(copy)
    back = transfers.reload(copy)
    transfers.finish(copy)
    streams.drain()
    streams.check(back, 7, "after the disk")
    assert streams.violations == []
    transfers.discard(copy)
    transfers.close()


def test_what_was_freed_late_is_not_in_the_way(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = ThreadTransfers(SpillFile(tmp_path))
    storage = torch.empty(4096, dtype=torch.uint8).untyped_storage()
    copy_slot = CopySlot(storage=0, begin=0, end=9, nbytes=4096, offset=2048)
    with monkeypatch.context() as patch:
        patch.setattr(transfers._queue, "settle", lambda: None)  # as in the middle of another change
        for _ in range(3):
            copy = transfers.offload(storage, copy_slot)
            assert isinstance(copy, SpillCopy) and copy.offset == 2048
            transfers.discard(copy)
    transfers.close()


# Real steps -----------------------------------------------------------------------------------------------------------


class Watched:
    """The bytes in a spill file or in slabs, and where planned ones went."""

    def __init__(self, tier: SpillFile | HostSlabs, patch: pytest.MonkeyPatch) -> None:
        self.most = self.bytes = self.astray = self.unplanned = 0
        reserve, free = tier.reserve, tier.free

        def reserve_and_count(nbytes: int, at: int | None = None) -> int | SlabBlock:
            found = reserve(nbytes, at)
            self.bytes += nbytes
            self.most = max(self.most, self.bytes)
            self.unplanned += at is None
            self.astray += at is not None and at != (found.offset if isinstance(found, SlabBlock) else found)
            return found

        def free_and_count(*block: SlabBlock | int) -> None:
            free(*block)  # type: ignore[arg-type]
            self.bytes -= block[0].nbytes if isinstance(block[0], SlabBlock) else int(block[-1])

        patch.setattr(tier, "reserve", reserve_and_count)
        patch.setattr(tier, "free", free_and_count)

    def begin(self) -> None:
        """Count anew, from what is there."""
        self.most, self.astray, self.unplanned = self.bytes, 0, 0


class AtOnce(FakeStreams):
    """A device that has copied everything before anybody computes."""

    def record_compute(self) -> FakeEvent:
        self.drain()
        return super().record_compute()

    def compute_waits(self, event: StreamEvent) -> None:
        self.drain()

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        return torch.empty(nbytes, dtype=torch.uint8).untyped_storage()


def make_room(profile: HardwareProfile, share: float, **options: object) -> tuple[Room, nn.Module, object]:
    """Three passes of other sizes in one step, each begun before the one before it goes back."""
    torch.manual_seed(0)
    model = nn.Sequential(*(each for _ in range(6) for each in (nn.Linear(96, 96), nn.Tanh(), nn.LayerNorm(96))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        losses: list[torch.Tensor] = []
        for rows in (300, 500, 400):
            losses.append(model(torch.randn(rows, 96)).square().mean())
            if len(losses) > 1:
                losses.pop(0).backward()
        losses.pop().backward()
        optimizer.step()
        optimizer.zero_grad()

    with elbowroom.fit(model, optimizer, 1 << 40, profile=profile, step=step) as plain:
        assert plain.planned is not None
        peak = plain.planned.forecast.peak_bytes
    return elbowroom.fit(model, optimizer, int(peak * share), profile=profile, **options), model, step  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "strategy"), [("file", "auto"), ("file", "offload_all"), ("slabs", "offload_all")])
def test_real_steps_take_little_more_than_what_is_there_at_once(
    profile: HardwareProfile, kind: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, _, step = make_room(profile, 0.6, strategy=strategy)
    tier: SpillFile | HostSlabs = room._transfers._spill  # type: ignore[attr-defined]
    if kind == "slabs":
        room._transfers.close()
        streams = AtOnce()
        # The host's memory, which on a CPU is the device's as well, is not to count as the room's.
        monkeypatch.setattr(pinned, "_new_memory", lambda nbytes: torch.from_numpy(np.empty(nbytes, dtype=np.uint8)))
        tier = HostSlabs(1 << 30, 1 << 20, pinning=streams)
        room._transfers = room._modes._transfers = StreamTransfers(streams, tier)
    watched, sizes = Watched(tier, monkeypatch), []
    for index in range(6):
        watched.begin()
        with room.step():
            step()  # type: ignore[operator]
        taken = tier.file_bytes if isinstance(tier, SpillFile) else tier.slab_bytes
        sizes.append(taken)
        record = room.journal().steps[-1]
        if record.mode is Mode.PLANNED and index > 2:
            assert room.planned is not None
            assert watched.most <= taken <= MOST_OVER * watched.most
            assert (watched.astray, watched.unplanned) == (0, 0)
            assert taken - 512 < room.planned.placement.lower_bytes <= taken
            assert room.planned.forecast.lower_arena_bytes == room.planned.placement.lower_bytes
    assert record.mode is Mode.PLANNED and watched.most > 0
    assert sizes[-1] < sizes[0]  # what the first step took, which nobody had planned, was given back
    room.detach()
