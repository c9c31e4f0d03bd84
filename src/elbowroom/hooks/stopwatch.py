"""How long an op takes on its device, without waiting for it.

    host     --mark--call--mark------------------look: past? -------->
    device   -----------------o----op----o--------------------------->

An accelerator runs an op after the host has handed it out. So a mark is left in the device's own order before and after
the op, and the time between the two is read once the device has passed them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

MOST_PENDING = 256
"""Measurements that are under way at once; ops beyond are timed when they are seen again."""


class Mark(Protocol):
    """A point in what a device does."""

    def is_past(self) -> bool:
        """Whether the device has got there. Never waits."""
        ...

    def seconds_since(self, earlier: Any) -> float:
        """Between a mark of the same kind and this one; asked once this one is past."""
        ...


class HostMark:
    """For a device that has done what it was told when the call returns."""

    __slots__ = ("_seconds",)

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def is_past(self) -> bool:
        """It is."""
        return True

    def seconds_since(self, earlier: HostMark) -> float:
        """By the host's clock."""
        return self._seconds - earlier._seconds


class CudaMark:
    """An event in the stream that is current on a device."""

    __slots__ = ("_event",)

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(torch.cuda.current_stream(device))

    def is_past(self) -> bool:
        """Whether the stream has passed it. To ask while a graph is captured would end the capture."""
        return not torch.cuda.is_current_stream_capturing() and bool(self._event.query())

    def seconds_since(self, earlier: CudaMark) -> float:
        """By the device's clock."""
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Pace:
    """How long something takes: a mean over its first runs.

    Attributes:
        seconds: as far as is known. The first run warms up what is cold: it stands only until there is another one.
        begun: how many runs were measured, or are being measured.
    """

    __slots__ = ("_count", "begun", "seconds")

    ENOUGH = 4

    def __init__(self) -> None:
        self.seconds = 0.0
        self.begun = self._count = 0

    def add(self, seconds: float) -> None:
        """One run took so long."""
        self._count += 1
        self.seconds += (seconds - self.seconds) / max(1, self._count - 1)


class Stopwatch:
    """Times ops on one device.

    Args:
        mark: leaves a mark in what the device does; None where that cannot be done.
    """

    def __init__(self, mark: Callable[[], Mark | None]) -> None:
        self._mark = mark
        self._pending: deque[tuple[Mark, Mark, Pace]] = deque()

    def time(self, pace: Pace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op, which is timed. Until the device has told, the host's seconds stand in."""
        self.collect()
        begin = self._mark() if len(self._pending) < MOST_PENDING else None
        before = time.perf_counter()
        result = func(*args, **kwargs)
        if begin is not None and (end := self._mark()) is not None:
            if not pace.begun:
                pace.seconds = time.perf_counter() - before
            pace.begun += 1
            self._pending.append((begin, end, pace))
            self.collect()
        return result

    def collect(self) -> None:
        """Read what the device has passed by now."""
        while self._pending:
            try:
                begin, end, pace = self._pending.popleft()
            except IndexError:  # another thread has read it
                return
            if not end.is_past():
                self._pending.appendleft((begin, end, pace))
                return
            pace.add(end.seconds_since(begin))


def make_stopwatch(device: torch.device) -> Stopwatch:
    """The one for a device."""

    def mark() -> CudaMark | None:
        # What is captured into a graph does not run now.
        return None if torch.cuda.is_current_stream_capturing() else CudaMark(device)

    return Stopwatch(mark if device.type == "cuda" else HostMark)
