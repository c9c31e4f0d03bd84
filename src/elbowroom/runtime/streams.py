"""Streams for transfers that overlap with compute, and their implementation for CUDA.

    compute  --op--op--o--------op--wait--op-->
                        \\            /
    out      ------------wait--copy-o--------->

Streams are ordered by events; the host only enqueues work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from elbowroom.errors import DeviceFull


class StreamEvent(Protocol):
    """Point in a stream."""

    def is_done(self) -> bool:
        """Tell whether the stream has passed the event. Never waits."""
        ...


class Streams(Protocol):
    """Three streams of one device: one computes, one copies to the host, one copies back.

    Each stream works in order; only events order the streams among each other. Only `host_waits` and
    `host_waits_for_copies` block the host. Storages and host tensors must stay alive until a wait for their copy.
    """

    @property
    def device(self) -> torch.device:
        """The device that storages must be on."""
        ...

    def record_compute(self) -> StreamEvent:
        """Record an event after everything that the program has enqueued on the compute stream so far."""
        ...

    def copy_out(
        self, source: torch.UntypedStorage, host: torch.Tensor, after: Sequence[StreamEvent], source_offset: int = 0
    ) -> StreamEvent:
        """Copy `host.numel()` bytes of a storage, from `source_offset` on, to the host, once `after` is done."""
        ...

    def copy_in(
        self, host: torch.Tensor, target: torch.UntypedStorage, after: Sequence[StreamEvent], target_offset: int = 0
    ) -> StreamEvent:
        """Copy a host tensor's bytes into a storage, from `target_offset` on, once `after` is done."""
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


class CudaEvent:
    """Event, and the compute stream that it was recorded for."""

    __slots__ = ("computing", "event")

    def __init__(self, event: torch.cuda.Event, computing: torch.cuda.Stream | None) -> None:
        self.event, self.computing = event, computing

    def is_done(self) -> bool:
        return bool(self.event.query())


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
        self._out: torch.cuda.Stream | None = None
        self._back: torch.cuda.Stream | None = None

    @property
    def out_stream(self) -> torch.cuda.Stream:
        """Stream that copies to the host."""
        if self._out is None:
            self._out = torch.cuda.Stream(self.device)
        return self._out

    @property
    def back_stream(self) -> torch.cuda.Stream:
        """Stream that copies from the host."""
        if self._back is None:
            self._back = torch.cuda.Stream(self.device)
        return self._back

    def record_compute(self) -> CudaEvent:
        computing = torch.cuda.current_stream(self.device)
        return CudaEvent(computing.record_event(), computing)

    def copy_out(
        self, source: torch.UntypedStorage, host: torch.Tensor, after: Sequence[StreamEvent], source_offset: int = 0
    ) -> CudaEvent:
        return self._copy(self.out_stream, self._bytes_of(source, source_offset, host.numel()), host, after)

    def copy_in(
        self, host: torch.Tensor, target: torch.UntypedStorage, after: Sequence[StreamEvent], target_offset: int = 0
    ) -> CudaEvent:
        return self._copy(self.back_stream, host, self._bytes_of(target, target_offset, host.numel()), after)

    def _copy(
        self, stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor, after: Sequence[StreamEvent]
    ) -> CudaEvent:
        computing = None
        for event in after:
            assert isinstance(event, CudaEvent)
            stream.wait_event(event.event)
            computing = computing or event.computing
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return CudaEvent(stream.record_event(), computing)

    def _bytes_of(self, storage: torch.UntypedStorage, offset: int, nbytes: int) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, offset, (nbytes,), (1,))

    def compute_waits(self, event: StreamEvent) -> None:
        assert isinstance(event, CudaEvent)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event.event)
        # The memory belongs to the stream that was current when the copy began. That stream's later work may reuse it,
        # even if the program has switched to another stream since.
        if event.computing is not None and event.computing != current:
            event.computing.wait_event(event.event)

    def host_waits(self, event: StreamEvent) -> None:
        assert isinstance(event, CudaEvent)
        event.event.synchronize()

    def host_waits_for_copies(self) -> None:
        for stream in (self._out, self._back):
            if stream is not None:
                stream.synchronize()

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        except torch.OutOfMemoryError as error:
            raise DeviceFull(
                f"{self.device} has no room to reload {nbytes} bytes; lower memory_budget= to leave more memory free"
            ) from error
