"""The streams and the pinned memory of a real CUDA device by themselves."""

from __future__ import annotations

import pytest
import torch

from elbowroom.errors import TransferFailed, UsageError
from elbowroom.runtime.stream_transfers import StreamTransfers
from elbowroom.runtime.streams import CudaStreams
from elbowroom.tiers.pinned import CudaPinning, HostSlabs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_the_current_stream_is_left_as_it_was() -> None:
    streams = CudaStreams(torch.device("cuda"))
    transfers = StreamTransfers(streams, HostSlabs(1 << 20, 1 << 20))
    before = torch.cuda.current_stream()
    copy = transfers.offload(streams.allocate(1000))
    transfers.reload(copy)
    transfers.finish(copy)
    assert torch.cuda.current_stream() == before
    assert len({before, streams.out_stream, streams.back_stream}) == 3
    transfers.discard(copy)
    transfers.close()


def test_no_room_on_the_device_is_a_failed_transfer() -> None:
    with pytest.raises(TransferFailed, match="memory_budget="):
        CudaStreams(torch.device("cuda")).allocate(1 << 50)


def test_only_storages_of_the_right_device_are_moved() -> None:
    transfers = StreamTransfers(CudaStreams(torch.device("cuda")), HostSlabs(1 << 20))
    with pytest.raises(UsageError, match="cpu"):
        transfers.offload(torch.empty(8).untyped_storage())
    transfers.close()


def test_slabs_are_pinned_and_given_back() -> None:
    host = HostSlabs(3 << 20, 1 << 20)
    block = host.reserve(1000)
    pinning, memory = CudaPinning(), block.slab.memory
    assert not pinning.pin(block.address, 1 << 20), "it is not pinned yet"
    assert host.pinned_bytes == host.slab_bytes == 1 << 20
    host.close()
    assert host.pinned_bytes == 0
    assert pinning.pin(memory.data_ptr(), 1 << 20), "it is still pinned"
    pinning.unpin(memory.data_ptr())


def test_a_refusal_leaves_no_error_behind() -> None:
    host = HostSlabs(1 << 20, 1 << 20)
    block = host.reserve(1 << 20)
    assert not CudaPinning().pin(block.address, 1 << 20)  # it is pinned already
    assert torch.ones(1000, device="cuda").sum().item() == 1000
    host.close()
