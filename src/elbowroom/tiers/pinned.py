"""Host memory that a device can copy to and from by itself: a few big slabs, cut into blocks by offset.

    slab 0 |block|block|......|block|      slab 1 |.....|block|.........|

Pinning through the framework's own allocator would round every request up to a power of two and take milliseconds for
each. Here whole slabs of plain memory are registered with the driver once, and a block is an offset.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from dataclasses import dataclass
from typing import Protocol

import torch

from elbowroom.errors import TierFull
from elbowroom.layout.free_list import FreeList

NAME = "host memory"
CHUNK_BYTES = 256 << 20
ALIGNMENT_BYTES = 512
PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for every device of the process."""

logger = logging.getLogger(__name__)


class Pinning(Protocol):
    """Makes stretches of host memory reachable for a device, and undoes it."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Whether the memory is pinned now; False leaves it as it was."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin` of the stretch that begins at `address`."""
        ...


class CudaPinning:
    """Registers memory with the CUDA driver.

    Args:
        device: whose context is used; the current one if None. (Registering in the context of another device would
            create that context, which takes hundreds of megabytes there.)
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    def pin(self, address: int, nbytes: int) -> bool:
        with torch.cuda.device(self._device):
            if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, PORTABLE)) == 0:
                return True
            # The refusal stays behind as the thread's last error, where the next kernel launch would find it and
            # raise it as its own. A launch is made here to take it away.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            return False

    def unpin(self, address: int) -> None:
        with torch.cuda.device(self._device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
                logger.warning("the driver did not give a stretch of pinned memory back; it stays pinned")


class Pageable:
    """Pins nothing: for a machine without a device, and where pinned memory must not be used."""

    def pin(self, address: int, nbytes: int) -> bool:
        return True

    def unpin(self, address: int) -> None:
        pass


@dataclass(slots=True, eq=False)
class _Slab:
    memory: torch.Tensor
    free: FreeList
    is_pinned: bool


@dataclass(slots=True, eq=False)
class Block:
    """A stretch of one slab.

    Attributes:
        nbytes: what was asked for.
        offset: where it begins in its slab, in bytes.
        tensor: its memory, `nbytes` elements of uint8.
    """

    nbytes: int
    offset: int
    tensor: torch.Tensor
    slab: _Slab

    @property
    def address(self) -> int:
        """Where its memory begins."""
        return self.tensor.data_ptr()


class HostSlabs:
    """Blocks of pinned host memory.

    A block never spans two slabs. A block larger than a chunk gets a slab of its own size; whoever knows how much will
    be needed passes that as `chunk_bytes`, and nothing is lost between slabs.

    Args:
        capacity_bytes: the most that slabs may take together.
        chunk_bytes: what is taken from the system at a time, as long as the capacity allows it.
        pinning: who pins the slabs; the CUDA driver, in the current device's context, if None.

    Attributes:
        slab_bytes: taken from the system now.
        pinned_bytes: of these, pinned.
        block_bytes: of these, handed out, rounding included.
    """

    def __init__(self, capacity_bytes: int, chunk_bytes: int = CHUNK_BYTES, *, pinning: Pinning | None = None) -> None:
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._chunk_bytes = _round(chunk_bytes)
        self._pinning = pinning if pinning is not None else CudaPinning()
        self._may_pin = True
        self._slabs: list[_Slab] = []
        self.slab_bytes = self.pinned_bytes = self.block_bytes = 0

    def reserve(self, nbytes: int) -> Block:
        """A block of exactly `nbytes`. What is in it is unspecified.

        Raises:
            TierFull: no slab has room and the capacity or the system allows no further one.
        """
        for slab in self._slabs:
            offset = slab.free.take(nbytes)
            if offset is not None:
                return self._cut(slab, offset, nbytes)
        slab = self._grow(nbytes)
        offset = slab.free.take(nbytes)
        assert offset is not None
        return self._cut(slab, offset, nbytes)

    def free(self, block: Block) -> None:
        """Give a block's room back. Its memory may be handed out again at once."""
        block.slab.free.give(block.offset, block.nbytes)
        self.block_bytes -= _round(block.nbytes)

    def fits_after_release(self, nbytes: int) -> bool:
        """Whether `reserve` would find room once `release_empty` was called."""
        empty_bytes = sum(slab.memory.numel() for slab in self._slabs if slab.free.is_empty)
        return empty_bytes > 0 and self.slab_bytes - empty_bytes + _round(nbytes) <= self.capacity_bytes

    def release_empty(self) -> None:
        """Give the slabs without blocks back to the system. No transfer may still be running in them."""
        for slab in [slab for slab in self._slabs if slab.free.is_empty]:
            self._drop(slab)

    def close(self) -> None:
        """Give everything back to the system. No transfer may still be running in it."""
        while self._slabs:
            self._drop(self._slabs[-1])
        self.block_bytes = 0

    def _cut(self, slab: _Slab, offset: int, nbytes: int) -> Block:
        self.block_bytes += _round(nbytes)
        return Block(nbytes, offset, slab.memory.narrow(0, offset, nbytes), slab)

    def _grow(self, nbytes: int) -> _Slab:
        left = self.capacity_bytes - self.slab_bytes
        if _round(nbytes) > left:
            raise TierFull(
                NAME, nbytes, self.capacity_bytes - self.block_bytes,
                f"It may take {self.capacity_bytes} bytes in slabs, none of which has room for the block in one piece. "
                "Give it more with host_bytes=, or let it overflow to disk with spill_folder=."
            )  # fmt: skip
        size = max(_round(nbytes), min(self._chunk_bytes, left))
        try:
            memory = _new_memory(size)
        except RuntimeError as error:
            raise TierFull(NAME, nbytes, 0, "The system refuses more memory; lower host_bytes=.") from error
        is_pinned = self._pin(memory)
        slab = _Slab(memory, FreeList(size, ALIGNMENT_BYTES), is_pinned)
        self._slabs.append(slab)
        self.slab_bytes += size
        self.pinned_bytes += size if is_pinned else 0
        return slab

    def _pin(self, memory: torch.Tensor) -> bool:
        if not self._may_pin:
            return False
        if self._pinning.pin(memory.data_ptr(), memory.numel()):
            return True
        # What was refused once would be refused for every later slab too.
        self._may_pin = False
        logger.warning(
            "the system refuses to pin %d bytes of host memory (after %d bytes; see `ulimit -l`, or the limits of WSL "
            "or the container): going on with pageable memory, whose transfers are slower and do not overlap",
            memory.numel(), self.pinned_bytes,
        )  # fmt: skip
        return False

    def _drop(self, slab: _Slab) -> None:
        self._slabs.remove(slab)
        size = slab.memory.numel()
        self.slab_bytes -= size
        if slab.is_pinned:
            self.pinned_bytes -= size
            self._pinning.unpin(slab.memory.data_ptr())


def _new_memory(nbytes: int) -> torch.Tensor:
    # Pinning works on whole pages, which must not be shared with a neighbour that is pinned or freed by itself.
    page = mmap.PAGESIZE
    with torch.inference_mode(False):  # memory made in inference mode could not be written to outside of it
        memory = torch.empty(-(-nbytes // page) * page + page, dtype=torch.uint8, device="cpu")
    return memory.narrow(0, -memory.data_ptr() % page, nbytes)


def _round(nbytes: int) -> int:
    return max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
