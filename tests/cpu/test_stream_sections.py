"""Sections of copies on streams, on a fake device that runs them as late, as early or as randomly as events allow."""

from __future__ import annotations

import random

import pytest
import torch

from elbowroom.runtime.copies import Copy, Extents
from elbowroom.runtime.stream_transfers import StreamTransfers
from elbowroom.tiers.pinned import HostSlabs
from tests.fake_streams import SCHEDULES, FakeStreams, ForgetfulStreams

SIZE = 700
SECTIONS = 6


def write(streams: FakeStreams, transfers: StreamTransfers, copy: Copy, place: int, number: int) -> None:
    """Compute a section, write it, and let go of its memory once compute waits for the transfer."""
    section = streams.allocate(SIZE)
    streams.write(section, number)
    finish = transfers.move_section(copy, section, Extents(place * SIZE, 0, SIZE), is_out=True)
    streams.pause()
    finish()


def read(streams: FakeStreams, transfers: StreamTransfers, copy: Copy, place: int) -> torch.UntypedStorage:
    section = streams.allocate(SIZE)
    halves = Extents(place * SIZE, 0, SIZE // 2, ((2, SIZE // 2, SIZE // 2),))
    finish = transfers.move_section(copy, section, halves, is_out=False)
    streams.pause()
    finish()
    return section


def run(streams: FakeStreams, seed: int) -> list[str]:
    chance = random.Random(seed)
    transfers = StreamTransfers(streams, HostSlabs(1 << 15, 8 << 10, pinning=streams))
    for _ in range(3):
        copy = transfers.make_copy(SECTIONS * SIZE)
        numbers = list(range(SECTIONS))
        for place in numbers:
            write(streams, transfers, copy, place, place)
        for _ in range(20):
            place = chance.randrange(SECTIONS)
            section = read(streams, transfers, copy, place)
            streams.check(section, numbers[place], f"section {place}")
            del section
            if chance.random() < 0.5:
                numbers[place] = chance.randrange(1000)
                write(streams, transfers, copy, place, numbers[place])
        transfers.discard(copy)
    transfers.close()
    streams.drain()
    return streams.violations


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_section_holds_what_was_written_last(schedule: str) -> None:
    for seed in range(8):
        assert run(FakeStreams(seed, schedule), seed) == []


@pytest.mark.parametrize(
    "forgets",
    [("copy_out", "compute"), ("copy_in", "compute"), ("compute", "back"), ("compute", "out")],
)
def test_each_edge_is_needed(forgets: tuple[str, str]) -> None:
    assert any(run(ForgetfulStreams(seed, schedule, forgets), seed) for schedule in SCHEDULES for seed in range(8))
