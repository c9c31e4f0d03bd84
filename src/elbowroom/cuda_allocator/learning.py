"""Learns the allocation requests of each stream in a step from recorded events, and plans their addresses.

Time is the index of the stream's own requests: a block that is freed before request n lives until n. A block that
outlives its step is planned only if the next step frees it before it repeats the request.

    step      |a....a'......|  |a....a'......|         a, b: allocated     a', b': freed
              |      b......|  |..b' b.......|         a: [0, 5)           b: [5, 2), which wraps

A step is laid out once it has occurred twice. Later recordings only extend lifetimes.

Segments that contain persistent blocks (weights, optimizer state) stay reserved with or without a plan, including their
free space. So requests that the pool served from such segments, in the step that is laid out, are left to the pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from elbowroom.cuda_allocator.library import STEP_BEGINS, STEP_ENDS
from elbowroom.ir.buffers import Buffer
from elbowroom.layout.lay_out import lay_out

OUTLIVES = -1
"""End of a block that is left to the pool."""

UNKNOWN = 0
"""End of a block that is not freed yet."""

UNIT_BYTES = 512
MOST_KINDS = 8
"""Most kinds of steps remembered per stream."""


@dataclasses.dataclass(slots=True, eq=False)
class Requests:
    """The requests of a stream in one step.

    Attributes:
        sizes: bytes of each request.
        ends: number of requests before each block is freed, counted on into the next step; OUTLIVES or UNKNOWN.
        segments: address of each block's segment; 0 in an arena.
    """

    sizes: list[int] = dataclasses.field(default_factory=list)
    ends: list[int] = dataclasses.field(default_factory=list)
    segments: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """Planned offsets for one kind of step.

    Attributes:
        stream: the stream that makes the requests.
        sizes: bytes of each request.
        offsets: in the arena; -1 for requests that are left to the pool.
        arena_bytes: size of the arena.
        bound_bytes: lower bound on the arena of any layout.
    """

    stream: int
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    arena_bytes: int
    bound_bytes: int


class RequestPlanner:
    """Makes plans from the events recorded on one device.

    Args:
        list_blocks: returns the allocated blocks, as an array of `EVENT`.
    """

    def __init__(self, list_blocks: Callable[[], Any]) -> None:
        self._list_blocks = list_blocks
        self._steps: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # ends, by stream and sizes
        self._planned: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        self.forget()

    def forget(self) -> None:
        """Reset after a loss of events: earlier events cannot be matched with later ones."""
        self._now: dict[int, Requests] | None = None
        self._last: dict[int, Requests] = {}
        self._live: dict[int, tuple[int, Requests, int]] = {}  # live blocks, by serial: stream, its requests, index

    def read(self, events: Any) -> list[StreamPlan]:
        """Process the events recorded since the last call. Returns new plans.

        Cost: a layout search per new plan, up to some seconds for ten thousand requests.
        """
        found: list[StreamPlan] = []
        for nbytes, serial, stream, segment in events.tolist():
            if nbytes == STEP_BEGINS:
                self._now = {}
            elif nbytes == STEP_ENDS and self._now is not None:
                found += self._end_step(self._now)
                self._last, self._now = self._now, None
            elif nbytes > 0 and self._now is not None:
                requests = self._now.setdefault(stream, Requests())
                self._live[serial] = stream, requests, len(requests.sizes)
                requests.sizes.append(nbytes)
                requests.ends.append(UNKNOWN)
                requests.segments.append(segment)
            elif nbytes == 0 and serial in self._live:
                self._give(*self._live.pop(serial))
        return found

    def _give(self, stream: int, requests: Requests, place: int) -> None:
        end = len(requests.sizes)
        if self._now is not None and self._now.get(stream) is not requests:
            end += len(self._now[stream].sizes) if stream in self._now else 0
        requests.ends[place] = end

    def _end_step(self, now: dict[int, Requests]) -> list[StreamPlan]:
        """Merge the previous step, which is complete now, and this one so far; return new plans."""
        for stream, before in self._last.items():
            count, is_alike = len(before.sizes), stream in now and now[stream].sizes == before.sizes
            ends = [end if end and (end <= count or is_alike) else OUTLIVES for end in before.ends]
            self._remember((stream, tuple(before.sizes)), ends)
        for serial in [serial for serial, (_, requests, _) in self._live.items() if requests not in now.values()]:
            del self._live[serial]
        found = []
        for stream, requests in now.items():
            kind = stream, tuple(requests.sizes)
            if kind in self._steps:
                self._remember(kind, requests.ends)
                if self._planned.get(kind) != tuple(self._steps[kind]):
                    self._planned[kind] = tuple(self._steps[kind])
                    found.append(make_plan(stream, requests.sizes, self._leave_to_pool(kind, requests)))
        return found

    def _leave_to_pool(self, kind: tuple[int, tuple[int, ...]], requests: Requests) -> list[int]:
        """Return the ends of requests, with OUTLIVES for those served from segments of persistent blocks."""
        ends = self._steps[kind]
        leaving = {
            serial for serial, (_, whose, place) in self._live.items() if whose is requests and ends[place] != OUTLIVES
        }
        kept = {segment for _, serial, _, segment in self._list_blocks().tolist() if serial not in leaving} - {0}
        return [OUTLIVES if segment in kept else end for end, segment in zip(ends, requests.segments, strict=True)]

    def _remember(self, kind: tuple[int, tuple[int, ...]], ends: Sequence[int]) -> None:
        known = self._steps.pop(kind, None)
        self._steps[kind] = list(ends) if known is None else [merge(*both) for both in zip(known, ends, strict=True)]
        same = [each for each in self._steps if each[0] == kind[0]]
        if len(same) > MOST_KINDS:
            del self._steps[same[0]]
            self._planned.pop(same[0], None)


def merge(known: int, end: int) -> int:
    """Merge the ends of a block in two occurrences of a step."""
    return known if end == UNKNOWN else OUTLIVES if OUTLIVES in (known, end) else max(known, end)


def make_plan(stream: int, sizes: Sequence[int], ends: Sequence[int]) -> StreamPlan:
    """Lay out the requests of one kind of step; blocks still live when their request recurs are left to the pool."""
    count = len(sizes)
    buffers = []
    for place, (nbytes, end) in enumerate(zip(sizes, ends, strict=True)):
        if end in (OUTLIVES, UNKNOWN) or end > count + place:
            continue
        lower, upper = place, end if end <= count else end - count
        if lower == upper:
            lower, upper = 0, count
        buffers.append(Buffer(id=place, lower=lower, upper=upper, nbytes=nbytes, alignment=UNIT_BYTES))
    layout = lay_out(buffers)
    offsets = [-1] * count
    for buffer, offset in zip(buffers, layout.offsets, strict=True):
        offsets[buffer.id] = offset
    return StreamPlan(
        stream=stream, sizes=tuple(sizes), offsets=tuple(offsets), arena_bytes=layout.arena_bytes,
        bound_bytes=layout.bound_bytes,
    )  # fmt: skip
