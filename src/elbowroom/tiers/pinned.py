"""Pinned host memory in a few big slabs, divided into blocks by offset.

    planned step    |block|block|......|block|      one slab, as large as the layout
    other steps     |.....|block|.........|         one chunk at a time

PyTorch's pinned allocator would round every request up to a power of two and take milliseconds for each. Here whole
slabs of plain memory are registered with the driver once, and a block is an offset. Forked processes have no slabs.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from elbowroom.errors import TierFull
from elbowroom.layout.free_list import ALIGNMENT_BYTES, FreeList
from elbowroom.tiers import unforked

NAME = "host memory"
CHUNK_BYTES = 256 << 20
SPARE_CHUNK_BYTES = 32 << 20
"""Size of chunks beside a planned slab, for unplanned copies."""

SLACK = 0.01
"""Share by which a planned slab may exceed its plan before it is replaced, since registering memory is slow."""

PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for every device of the process."""

logger = logging.getLogger(__name__)


class Pinning(Protocol):
    """Pins ranges of host memory for a device, and unpins them."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Pin a range of memory. Returns whether it succeeded."""
        ...

    def unpin(self, address: int) -> None:
        """Unpin the range that begins at `address`, if it is pinned."""
        ...


class CudaPinning:
    """Registers memory with the CUDA driver.

    Args:
        device: device in whose context to register; the current one if None. (The context of another device would
            be created, which takes hundreds of megabytes there.)
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    def pin(self, address: int, nbytes: int) -> bool:
        with torch.cuda.device(self._device):
            if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, PORTABLE)) == 0:
                return True
            # The refusal remains as the thread's last error, which the next kernel launch would raise as its own.
            # Launch a kernel to clear it.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device="cuda")
            return False

    def unpin(self, address: int) -> None:
        with torch.cuda.device(self._device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
                logger.warning("the driver could not unregister a range of pinned memory; it stays pinned")


@dataclass(slots=True, eq=False)
class _Slab:
    memory: torch.Tensor
    address: int
    free: FreeList
    is_pinned: bool
    stays: bool = False  # until `close`
    pid: int = field(default_factory=os.getpid)


@dataclass(slots=True, eq=False)
class SlabBlock:
    """Range of one slab.

    Attributes:
        nbytes: requested bytes.
        offset: offset in the slab in bytes.
        address: address of the block.
    """

    nbytes: int
    offset: int
    slab: _Slab
    address: int = field(init=False)

    def __post_init__(self) -> None:
        self.address = self.slab.address + self.offset

    @property
    def tensor(self) -> torch.Tensor:
        """Memory of the block, `nbytes` elements of uint8."""
        return self.slab.memory.narrow(0, self.offset, self.nbytes)

    def cut(self, begin: int, nbytes: int) -> SlabBlock:
        """Return a part of the block."""
        return SlabBlock(nbytes, self.offset + begin, self.slab)


class HostSlabs:
    """Blocks of pinned host memory.

    A block never spans two slabs. A block larger than a chunk gets a slab of its own size. `prepare` makes one slab of
    exactly the size that a planned step needs.

    Args:
        capacity_bytes: limit on all slabs together.
        chunk_bytes: size of a new slab, if the capacity allows it.
        pinning: pins the slabs; the CUDA driver, in the current device's context, if None.
    """

    def __init__(self, capacity_bytes: int, chunk_bytes: int = CHUNK_BYTES, *, pinning: Pinning | None = None) -> None:
        self.capacity_bytes = capacity_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        self._chunk_bytes = _round(chunk_bytes)
        self._pinning = pinning if pinning is not None else CudaPinning()
        self._may_pin = True
        self._slabs: list[_Slab] = []
        self._planned: _Slab | None = None
        self._refused_bytes = 1 << 62

    @property
    def slab_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.memory.numel() for slab in self._slabs)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of slabs that are pinned."""
        return sum(slab.memory.numel() for slab in self._slabs if slab.is_pinned)

    @property
    def block_bytes(self) -> int:
        """Bytes of blocks in use, rounding included."""
        return sum(slab.memory.numel() - (slab.free.free_bytes or 0) for slab in self._slabs)

    def reserve(self, nbytes: int, at: int | None = None) -> SlabBlock:
        """Reserve an uninitialized block of exactly `nbytes`.

        Args:
            at: planned offset in the planned slab. If it is taken, the block goes to another slab, if the capacity
                allows one, away from the planned blocks.

        Raises:
            TierFull: no slab has room, and the capacity or the system allows no further slab.
        """
        planned = self._planned
        if at is None or planned is None:
            return self._reserve_in(self._slabs, nbytes)
        if planned.free.take_at(at, nbytes):
            return self._cut(planned, at, nbytes)
        try:
            return self._reserve_in([slab for slab in self._slabs if slab is not planned], nbytes)
        except TierFull:
            offset = planned.free.take(nbytes)
            if offset is None:
                raise
            return self._cut(planned, offset, nbytes)

    def reserve_apart(self, nbytes: int) -> SlabBlock:
        """Reserve a block in a slab of its own, which stays until `close`.

        Raises:
            TierFull: the capacity or the system does not allow it.
        """
        if _round(nbytes) > self.capacity_bytes - self.slab_bytes:
            raise TierFull(NAME, nbytes, self.capacity_bytes - self.slab_bytes, "Give it more with host_bytes=.")
        slab = self._add(nbytes, _round(nbytes))
        slab.stays = True
        return self._cut(slab, slab.free.take(nbytes) or 0, nbytes)

    def _reserve_in(self, slabs: Sequence[_Slab], nbytes: int) -> SlabBlock:
        for slab in slabs:
            offset = slab.free.take(nbytes)
            if offset is not None:
                return self._cut(slab, offset, nbytes)
        slab = self._grow(nbytes)
        offset = slab.free.take(nbytes)
        assert offset is not None
        return self._cut(slab, offset, nbytes)

    def free(self, block: SlabBlock) -> None:
        """Free a block. Its memory may be reused at once."""
        block.slab.free.give(block.offset, block.nbytes)

    def restore(self, blocks: Iterable[SlabBlock]) -> None:
        """Rebuild the free lists from the used blocks, after an exception interrupted a change."""
        taken = list(blocks)
        for slab in self._slabs:
            slab.free.restore([(block.offset, block.nbytes) for block in taken if block.slab is slab])

    def prepare(self, planned_bytes: int, *, gives_back: bool, settle: Callable[[], None]) -> None:
        """Prepare one slab, as soon as no copies are in the way, for reservations with offsets below `planned_bytes`.

        Args:
            gives_back: whether to return excess memory to the system, except slabs used since the last call.
            settle: called before slabs are freed; waits for all transfers in them.
        """
        others = [slab for slab in self._slabs if not slab.stays]
        most = sum(slab.memory.numel() for slab in others) + self.capacity_bytes - self.slab_bytes
        size = min(_round(planned_bytes), most) if planned_bytes else 0
        has = 0 if self._planned is None else self._planned.memory.numel()
        unused = [slab for slab in others if slab.free.forget_end() == 0] if gives_back else []
        is_fitted = size <= has and not (gives_back and has > size * (1 + SLACK))
        if not is_fitted and not all(slab.free.is_empty for slab in others):
            return  # a copy is still alive: the next call tries again
        going = [slab for slab in unused if slab is not self._planned] if is_fitted else others
        if going:
            settle()
        for slab in going:
            self._drop(slab)
        if size and self._planned is None and size < self._refused_bytes:
            try:
                self._planned = self._add(size, size, is_planned=True)
            except TierFull:
                self._refused_bytes = size  # use chunks from now on

    def fits_after_release(self, nbytes: int) -> bool:
        """Tell whether `reserve` would succeed after `release_empty`."""
        empty_bytes = sum(slab.memory.numel() for slab in self._slabs if slab.free.is_empty)
        return empty_bytes > 0 and self.slab_bytes - empty_bytes + _round(nbytes) <= self.capacity_bytes

    def release_empty(self) -> None:
        """Return the slabs without blocks to the system. No transfer may still be running in them."""
        for slab in [slab for slab in self._slabs if slab.free.is_empty]:
            self._drop(slab)

    def close(self) -> None:
        """Return all slabs to the system. No transfer may still be running in them.

        A forked process only forgets the slabs of its parent.
        """
        while self._slabs:
            self._drop(self._slabs[-1])

    def __del__(self) -> None:
        if getattr(self, "_slabs", None):
            self.close()  # memory must not be freed while it is pinned

    def _cut(self, slab: _Slab, offset: int, nbytes: int) -> SlabBlock:
        return SlabBlock(nbytes, offset, slab)

    def _grow(self, nbytes: int) -> _Slab:
        left = self.capacity_bytes - self.slab_bytes
        if _round(nbytes) > left:
            raise TierFull(
                NAME, nbytes, self.capacity_bytes - self.block_bytes,
                f"Its slabs may take {self.capacity_bytes} bytes, and none has room for the block in one piece. "
                "Results of ops in slices lie there and not on the disk: give it more with host_bytes=."
            )  # fmt: skip
        chunk = self._chunk_bytes if self._planned is None else min(self._chunk_bytes, SPARE_CHUNK_BYTES)
        return self._add(nbytes, max(_round(nbytes), min(chunk, left)))

    def _add(self, nbytes: int, size: int, *, is_planned: bool = False) -> _Slab:
        """Add a slab for a block of `nbytes`.

        Raises:
            TierFull: the system refuses the memory, or refuses to pin a planned slab although it has pinned others.
        """
        try:
            memory = _new_memory(size)
        except RuntimeError as error:
            raise TierFull(NAME, nbytes, 0, "The system refuses more memory; lower host_bytes=.") from error
        slab = _Slab(memory, memory.data_ptr(), FreeList(size, ALIGNMENT_BYTES), self._may_pin)
        self._slabs.append(slab)  # before it is pinned, so that `close` unpins it even after an exception
        try:
            if self._may_pin:
                unforked.hold_back(memory)
                slab.is_pinned = self._pinning.pin(slab.address, size)
        except BaseException:
            self._drop(slab)
            raise
        if is_planned and slab.is_pinned is not self._may_pin:
            self._drop(slab)
            raise TierFull(NAME, nbytes, 0, "The system refuses to pin so much in one piece.")
        if not slab.is_pinned:
            self._give_up_pinning(size)
        return slab

    def _give_up_pinning(self, nbytes: int) -> None:
        """Stop pinning, since the system would refuse every later slab, too."""
        if self._may_pin:
            self._may_pin = False
            logger.warning(
                "the system refuses to pin %d bytes of host memory (after %d bytes; see `ulimit -l`, or the limits of "
                "WSL or the container): using pageable memory, whose transfers are slower and do not overlap",
                nbytes, self.pinned_bytes,
            )  # fmt: skip

    def _drop(self, slab: _Slab) -> None:
        if slab.pid == os.getpid():
            if slab.is_pinned:
                self._pinning.unpin(slab.address)
                slab.is_pinned = False
            unforked.give_back(slab.memory)
        self._slabs.remove(slab)
        if slab is self._planned:
            self._planned = None


def _new_memory(nbytes: int) -> torch.Tensor:
    # Pinning works on whole pages, which must not be shared with other allocations.
    page = mmap.PAGESIZE
    with torch.inference_mode(False):  # an inference tensor could not be written to outside inference mode
        memory = torch.empty(-(-nbytes // page) * page + page, dtype=torch.uint8, device="cpu")
    return memory.narrow(0, -memory.data_ptr() % page, nbytes)


def _round(nbytes: int) -> int:
    return max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES
