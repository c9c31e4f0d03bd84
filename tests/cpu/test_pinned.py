"""Slabs of host memory, with nothing or a record of it pinned."""

from __future__ import annotations

import logging

import pytest
import torch

from elbowroom.errors import TierFull
from elbowroom.tiers.pinned import HostSlabs
from tests.fake_streams import FakeStreams, Pageable


def test_slabs_are_pinned_whole_and_in_pages_of_their_own() -> None:
    streams = FakeStreams()
    host = HostSlabs(1 << 20, 100_000, pinning=streams)
    blocks = [host.reserve(nbytes) for nbytes in (1, 70_000, 90_000, 300_000)]
    assert [block.tensor.numel() for block in blocks] == [1, 70_000, 90_000, 300_000]
    assert all(block.tensor.dtype == torch.uint8 and block.address % 64 == 0 for block in blocks)
    assert len(streams.pinned) == 3
    assert all(address % 4096 == 0 for address in streams.pinned)
    assert host.slab_bytes == host.pinned_bytes == sum(streams.pinned.values()) < 600_000
    assert host.block_bytes >= 460_001
    for block in blocks:
        host.free(block)
    assert host.block_bytes == 0
    assert host.slab_bytes > 0  # kept for the next blocks
    host.close()
    assert streams.pinned == {}
    assert host.slab_bytes == host.pinned_bytes == 0


def test_slabs_never_exceed_the_capacity() -> None:
    host = HostSlabs(10_000, 4096, pinning=Pageable())
    for _ in range(2):
        host.reserve(4096)
    host.reserve(1500)
    assert host.slab_bytes <= 10_000
    with pytest.raises(TierFull) as caught:
        host.reserve(600)
    assert caught.value.free_bytes < 600


def test_memory_that_may_not_be_pinned_is_used_anyway(caplog: pytest.LogCaptureFixture) -> None:
    class Refuses(Pageable):
        asked = 0

        def pin(self, address: int, nbytes: int) -> bool:
            self.asked += 1
            return False

        def unpin(self, address: int) -> None:
            pytest.fail("what was never pinned was unpinned")

    pinning = Refuses()
    host = HostSlabs(1 << 20, 4096, pinning=pinning)
    with caplog.at_level(logging.WARNING):
        blocks = [host.reserve(4096) for _ in range(3)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert pinning.asked == 1
    assert host.pinned_bytes == 0 and host.slab_bytes == 3 * 4096
    blocks[0].tensor.fill_(1)
    host.close()


def test_memory_that_the_system_refuses_is_a_full_tier() -> None:
    host = HostSlabs(1 << 60, pinning=Pageable())
    with pytest.raises(TierFull, match="system refuses"):
        host.reserve(1 << 59)


def test_a_block_may_be_written_to_in_any_mode_whatever_it_was_made_in() -> None:
    host = HostSlabs(1 << 20, 4096, pinning=Pageable())
    with torch.inference_mode(), torch.device("meta"):
        block = host.reserve(100)
    block.tensor.fill_(1)
    with torch.inference_mode():
        block.tensor.copy_(torch.zeros(100, dtype=torch.uint8))
    assert block.tensor.device.type == "cpu"
