"""Streams of a device for transfers beside its compute, and their implementation for CUDA.

    compute  --op--op--o--------op--wait--op-->
                        \\            /
    out      ------------wait--copy-o--------->

The lanes are ordered by events; the host only hands out work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from elbowroom.errors import TransferFailed


class StreamEvent(Protocol):
    """A point in a stream."""

    def is_done(self) -> bool:
        """Tell whether the stream has passed the event. Never waits."""
        ...


class Streams(Protocol):
    """Three lanes of one device: the one that computes, one that copies out of it, one that copies back.

    Each lane does what it is given in order, and lanes are ordered by events alone. Only `host_waits` and
    `host_waits_for_copies` wait.
    Storages and host tensors must stay alive until the event of their copy has been waited for.
    """

    @property
    def device(self) -> torch.device:
        """The device that storages must be on."""
        ...

    def record_compute(self) -> StreamEvent:
        """A point after everything the program has given to the compute lane so far."""
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
        """Return when everything is done that was given to the lanes that copy."""
        ...

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """New memory on the device. What earlier computing does in the same place comes before `record_compute`.

        Raises:
            TransferFailed: there is not enough.
        """
        ...


class CudaEvent:
    """An event, and the compute stream on whose behalf it was recorded."""

    __slots__ = ("computing", "event")

    def __init__(self, event: torch.cuda.Event, computing: torch.cuda.Stream | None) -> None:
        self.event, self.computing = event, computing

    def is_done(self) -> bool:
        """Tell whether the stream has passed the event. Never waits."""
        return bool(self.event.query())


class CudaStreams:
    """The streams of a CUDA device: whichever is current computes, two of our own copy.

    The caching allocator hands memory out again in the order of the stream it was allocated on, without looking at
    ours. So nothing is marked with `record_stream`, whose blocks come back only when the allocator next looks: the
    compute stream waits for a copy before the memory is let go.

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
        """The stream that copies to the host."""
        if self._out is None:
            self._out = torch.cuda.Stream(self.device)
        return self._out

    @property
    def back_stream(self) -> torch.cuda.Stream:
        """The stream that copies from the host."""
        if self._back is None:
            self._back = torch.cuda.Stream(self.device)
        return self._back

    def record_compute(self) -> CudaEvent:
        """A point after everything the program has given to the stream that is current now."""
        computing = torch.cuda.current_stream(self.device)
        return CudaEvent(computing.record_event(), computing)

    def copy_out(
        self, source: torch.UntypedStorage, host: torch.Tensor, after: Sequence[StreamEvent], source_offset: int = 0
    ) -> CudaEvent:
        """Copy `host.numel()` bytes of a storage, from `source_offset` on, to the host, once `after` is done."""
        return self._copy(self.out_stream, self._bytes_of(source, source_offset, host.numel()), host, after)

    def copy_in(
        self, host: torch.Tensor, target: torch.UntypedStorage, after: Sequence[StreamEvent], target_offset: int = 0
    ) -> CudaEvent:
        """Copy a host tensor's bytes into a storage, from `target_offset` on, once `after` is done."""
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
        """Make later compute of the program wait for the event."""
        assert isinstance(event, CudaEvent)
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event.event)
        # The memory belongs to the stream the copy was begun from, and it is that stream's later work that may reuse
        # it, even if the program has switched to another one in between.
        if event.computing is not None and event.computing != current:
            event.computing.wait_event(event.event)

    def host_waits(self, event: StreamEvent) -> None:
        """Return when the event is done. Lets other threads run meanwhile."""
        assert isinstance(event, CudaEvent)
        event.event.synchronize()

    def host_waits_for_copies(self) -> None:
        """Return when everything is done that was given to the streams that copy."""
        for stream in (self._out, self._back):
            if stream is not None:
                stream.synchronize()

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """New memory, owned by the stream that is current now.

        Raises:
            TransferFailed: the device has not enough.
        """
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        except torch.OutOfMemoryError as error:
            raise TransferFailed(
                f"no room on {self.device} to bring {nbytes} bytes back; lower memory_budget=, so that more is left "
                "beside it"
            ) from error
