"""Streams for transfers that overlap with compute, and their implementation for CUDA.

    compute  --op--op--o--------op--wait--op-->
                        \\            /
    out      ------------wait--copy-o--------->

Streams are ordered by events; the host only enqueues work.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from elbowroom.errors import DeviceFull
from elbowroom.native import library
from elbowroom.runtime.compute_streams import ComputeStreams, MeetingStreams, StreamNumbers
from elbowroom.tiers.pinned import SlabBlock


class StreamEvent(Protocol):
    """Point in a stream."""

    def is_done(self) -> bool:
        """Tell whether the stream has passed the event. Never waits."""
        ...


class Streams(MeetingStreams, Protocol):
    """Three streams of one device: one computes, one copies to the host, one copies back.

    Each stream works in order; only events order the streams among each other. Only `host_waits` and
    `host_waits_for_copies` block the host. Storages and host blocks must stay alive until a wait for their copy.
    """

    @property
    def device(self) -> torch.device:
        """The device that storages must be on."""
        ...

    def record_compute(self) -> StreamEvent:
        """Record an event after everything that the program has enqueued on the compute stream so far."""
        ...

    def copy_out(
        self, source: torch.UntypedStorage, host: SlabBlock, after: Sequence[StreamEvent], source_offset: int = 0
    ) -> StreamEvent:
        """Copy `host.nbytes` bytes of a storage, from `source_offset` on, to the host, once `after` is done."""
        ...

    def copy_in(
        self, host: SlabBlock, target: torch.UntypedStorage, after: Sequence[StreamEvent], target_offset: int = 0
    ) -> StreamEvent:
        """Copy a host block's bytes into a storage, from `target_offset` on, once `after` is done."""
        ...

    def compute_waits(self, event: StreamEvent) -> None:
        """Make later compute of the program wait for the event."""
        ...

    def host_waits(self, event: StreamEvent) -> None:
        """Return when the event is done."""
        ...

    def host_waits_for_copies(self) -> None:
        """Return when both copy streams are idle."""
        ...

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """Allocate memory on the device. Earlier compute in the same memory comes before a later `record_compute`.

        Raises:
            DeviceFull: the device is out of memory.
        """
        ...


def number_stream(stream: torch.cuda.Stream) -> StreamNumbers:
    """Return what the extension knows a stream by."""
    return stream.stream_id, stream.device_index, stream.device_type


class CudaStreams:
    """`Streams` of a CUDA device: the current stream computes, two streams of our own copy.

    The caching allocator reuses memory in the order of the stream it was allocated on, regardless of our streams. So
    the compute stream waits for a copy before the memory is released. (`record_stream` would do, too, but such blocks
    only become free when the allocator next polls its events.)

    Args:
        device: a CUDA device; without an index, the current one.
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self._computing = ComputeStreams()

    @functools.cached_property
    def out_stream(self) -> torch.cuda.Stream:
        """Stream that copies to the host."""
        return torch.cuda.Stream(self.device)

    @functools.cached_property
    def back_stream(self) -> torch.cuda.Stream:
        """Stream that copies from the host."""
        return torch.cuda.Stream(self.device)

    @functools.cached_property
    def _copies(self) -> Any:
        return library.load().CopyStreams(number_stream(self.out_stream), number_stream(self.back_stream))

    def note_computing(self, stream: StreamNumbers) -> None:
        number, index, kind = stream
        if index != self.device.index:
            return
        self._computing.add(torch.cuda.default_stream(self.device))
        if self._computing.add(torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)):
            self.meet()

    def meet(self) -> None:
        if self._computing.are_several:
            self._computing.meet(torch.cuda.current_stream(self.device))

    def record_compute(self) -> StreamEvent:
        self.meet()
        event: StreamEvent = self._copies.record_compute()
        return event

    def copy_out(
        self, source: torch.UntypedStorage, host: SlabBlock, after: Sequence[StreamEvent], source_offset: int = 0
    ) -> StreamEvent:
        event: StreamEvent = self._copies.copy_out(source, source_offset, host.address, host.nbytes, after)
        return event

    def copy_in(
        self, host: SlabBlock, target: torch.UntypedStorage, after: Sequence[StreamEvent], target_offset: int = 0
    ) -> StreamEvent:
        event: StreamEvent = self._copies.copy_in(host.address, target, target_offset, host.nbytes, after)
        return event

    def compute_waits(self, event: StreamEvent) -> None:
        self._copies.compute_waits(event)
        self.meet()

    def host_waits(self, event: StreamEvent) -> None:
        event.synchronize()  # type: ignore[attr-defined]

    def host_waits_for_copies(self) -> None:
        self.out_stream.synchronize()
        self.back_stream.synchronize()

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        try:
            made = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        except torch.OutOfMemoryError as error:
            raise DeviceFull(
                f"{self.device} has no room to reload {nbytes} bytes; lower memory_budget= to leave more memory free"
            ) from error
        if self._computing.are_several:
            for each in self._computing.list_others(torch.cuda.current_stream(self.device)):
                made.record_stream(each)  # type: ignore[arg-type]
        return made.untyped_storage()
