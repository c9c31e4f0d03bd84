"""Transfers on streams that may still run."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

import torch

from elbowroom.runtime.stream_copies import StreamCopy, Unfinished
from elbowroom.runtime.streams import StreamEvent, Streams
from elbowroom.tiers.pinned import SlabBlock


class TransfersInFlight:
    """Keeps the storages and host blocks of transfers until these have ended, so that their memory is not reused.

    Args:
        streams: streams of the device.

    Attributes:
        is_certain: False while a transfer begins, and after an exception interrupted that, so that its end is unknown.
        stall_seconds: seconds that the host waited.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._unfinished: deque[Unfinished] = deque()
        self.is_certain = True
        self.stall_seconds = 0.0

    def begin(self, copy: StreamCopy, storage: torch.UntypedStorage) -> Unfinished:
        """Note that a transfer is about to begin. Its end has to be noted by `note_end`."""
        self.is_certain = False
        unfinished = Unfinished(copy, storage)
        self._unfinished.append(unfinished)
        copy.moving.append(unfinished)
        return unfinished

    def note_end(self, unfinished: Unfinished, event: StreamEvent | None) -> None:
        """Note the event at which a transfer ends; None if it has no end."""
        unfinished.event = event
        self.is_certain = event is not None

    def list_users(self, block: SlabBlock) -> list[StreamEvent]:
        """Return the end events of transfers that may still use host memory of a block."""
        begin = block.address
        end = begin + block.nbytes
        return [
            user.event for user in self._unfinished if user.begin < end and begin < user.end and user.event is not None
        ]

    def forget_ended(self) -> None:
        """Remove completed transfers, oldest first, up to the first that still runs."""
        if not self.is_certain:
            self.wait()
        unfinished = self._unfinished
        while unfinished and (event := unfinished[0].event) is not None and event.is_done():
            unfinished.popleft()

    def wait(self) -> None:
        """Have the host wait for all transfers."""
        with self.stalling():
            if not self.is_certain:
                self._streams.host_waits_for_copies()
            for user in self._unfinished:
                if user.event is not None:
                    self._streams.host_waits(user.event)
        self._unfinished.clear()
        self.is_certain = True

    @contextlib.contextmanager
    def stalling(self) -> Iterator[None]:
        """Count the seconds spent in this context as a stall."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.stall_seconds += time.perf_counter() - begin
