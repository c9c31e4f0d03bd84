"""The streams of a device on which a program computes, where there are several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, Self

StreamNumbers = tuple[int, int, int]
"""`stream_id`, `device_index` and `device_type` of a stream."""


class ComputeStream(Protocol):
    """Stream that can wait for what another one has been given so far, as `torch.cuda.Stream`."""

    def query(self) -> bool:
        """Tell whether the stream has done all that it has been given. Never waits."""
        ...

    def wait_stream(self, stream: Self, /) -> None:
        """Have later work of this stream wait for the present work of another."""
        ...

    def record_event(self) -> Any:
        """Return a point in the stream after its present work."""
        ...

    def wait_event(self, event: Any, /) -> None:
        """Have later work of this stream wait for a point in another."""
        ...


class MeetingStreams(Protocol):
    """Streams of a device, of which those that compute can meet."""

    def note_computing(self, stream: StreamNumbers) -> None:
        """Note that the program computes on this stream beside others, with storages that may move."""
        ...

    def meet(self) -> None:
        """Have the streams on which the program computes wait for each other. Nothing happens if there is one."""
        ...


class NoStreams:
    """`MeetingStreams` of a device without streams."""

    def note_computing(self, stream: StreamNumbers) -> None:
        pass

    def meet(self) -> None:
        pass


class ComputeStreams:
    """Orders the streams that compute with storages that may move.

    A program orders its streams where one uses what another computes. It does not know of what moves: memory is freed
    that another stream may still read, and contents are new that another stream has not waited for. So all of them
    meet wherever something moves.

    None is ever forgotten, though a program may use a new stream in each step until it has all of PyTorch's pool (32):
    memory that was allocated on a stream goes back to it when something leaves steps later, and the stream, once it is
    used again, may write there before it computes with anything that moves. Streams with nothing to do cost little.
    """

    def __init__(self) -> None:
        self._streams: list[ComputeStream] = []

    def add(self, stream: ComputeStream) -> bool:
        """Add a stream. Return False if it is known."""
        if stream in self._streams:
            return False
        self._streams.append(stream)
        return True

    @property
    def are_several(self) -> bool:
        """True if there is something to order."""
        return len(self._streams) > 1

    def list_others(self, current: ComputeStream) -> list[ComputeStream]:
        """Return the streams other than the current one."""
        return [each for each in self._streams if each != current]

    def meet(self, current: ComputeStream) -> None:
        """Have later work of each stream wait for the present work of all."""
        others = self.list_others(current)
        for each in others:
            if not each.query():
                current.wait_stream(each)
        event = current.record_event()
        for each in others:
            each.wait_event(event)


@contextlib.contextmanager
def meeting(streams: MeetingStreams) -> Iterator[None]:
    """Have streams meet before something is computed that all of them may use, and after it."""
    streams.meet()
    yield
    streams.meet()
