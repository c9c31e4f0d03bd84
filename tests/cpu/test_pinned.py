"""Slabs of host memory, with nothing or a record of it pinned."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import pathlib
import signal
from collections.abc import Callable

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


@pytest.mark.parametrize("nbytes", [1, 3 * mmap.PAGESIZE, 1 << 20])
def test_a_forked_process_has_no_slabs_and_leaves_their_addresses_alone(nbytes: int) -> None:
    """Linux would copy pinned pages to it. What it maps at their addresses is its own."""
    host = HostSlabs(4 << 20, 4096, pinning=Pageable())
    slab = host.reserve(nbytes).slab
    address, memory = slab.address, slab.memory
    pages = range(address, address + memory.numel(), mmap.PAGESIZE)
    memory.fill_(7)
    del slab, memory

    def use_child() -> bool:
        nonlocal host
        was_absent = not any(map(is_mapped, pages))
        own = map_at(address, len(pages) * mmap.PAGESIZE)
        ctypes.memset(own, 5, len(pages) * mmap.PAGESIZE)
        host.release_empty()
        host.close()
        del host
        gc.collect()
        for _ in range(100):  # the allocator does not give the slab to anyone either
            other = torch.empty(nbytes + (8 << 10), dtype=torch.uint8)
            ctypes.memset(other.data_ptr(), 9, other.numel())  # an op might wait for threads that a fork leaves behind
        return was_absent and all(ctypes.string_at(page, 4096) == b"\x05" * 4096 for page in pages)

    assert run_forked(use_child)
    assert all(map(is_mapped, pages))


def test_memory_of_slabs_that_were_given_back_is_there_in_forked_processes() -> None:
    host = HostSlabs(4 << 20, 4096, pinning=Pageable())
    memory = host.reserve(1 << 20).slab.memory
    memory.fill_(7)
    host.close()
    address, nbytes = memory.data_ptr(), memory.numel()
    assert run_forked(lambda: is_mapped(address) and ctypes.string_at(address, nbytes) == b"\x07" * nbytes)


def is_mapped(address: int) -> bool:
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= address < int(end, 16):
            return True
    return False


def map_at(address: int, nbytes: int) -> int:
    """Map private memory at an address where there is none. Return where it is."""
    fixed_noreplace = 0x100000
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_noreplace
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1
    found: int = call(*arguments, ctypes.c_long(0))
    assert found == address
    return found


def run_forked(call: Callable[[], bool]) -> bool:
    """Tell whether a call in a forked process returns true."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        status = 1
        try:
            status = 0 if call() else 2
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1] == 0
