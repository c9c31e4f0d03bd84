"""What a stream asks for in a step, learnt from what was recorded, and laid out.

Time is counted in the stream's own requests: a block that is given back before the n-th of them is there until n. What
outlives its step is planned if the next one gives it back before the request that it came from comes again.

    step      |a....a'......|  |a....a'......|         a, b: taken     a', b': given back
              |      b......|  |..b' b.......|         a: [0, 5)       b: [5, 2), which wraps

Once a step has come twice, it is laid out. Every later one that was recorded can only make lifetimes longer.

Segments in which blocks lie that stay for good (weights, the state of optimizers) are there whatever a plan says, and
so is what is free in them. So what the pool has served from there in the step that is laid out is left to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from elbowroom.cuda_allocator.library import STEP_BEGINS, STEP_ENDS
from elbowroom.ir.buffers import Buffer
from elbowroom.layout.lay_out import lay_out

OUTLIVES = -1
"""The end of a block that no arena is for."""

UNKNOWN = 0
"""The end of a block that is still there."""

UNIT_BYTES = 512
MOST_KINDS = 8
"""Kinds of steps that are remembered for each stream."""


@dataclasses.dataclass(slots=True, eq=False)
class Requests:
    """What a stream asks for in one step.

    Attributes:
        sizes: bytes of each request.
        ends: the number of requests at which each block is given back: beyond those of the step, those of the next one
            are counted on; OUTLIVES, UNKNOWN.
        segments: where each block's segment begins; 0 in an arena.
    """

    sizes: list[int] = dataclasses.field(default_factory=list)
    ends: list[int] = dataclasses.field(default_factory=list)
    segments: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """Where the blocks of one kind of step lie.

    Attributes:
        stream: whose requests these are.
        sizes: bytes of each request.
        offsets: in the arena; -1 for what is left to the pool.
        arena_bytes: what the arena has to have.
        bound_bytes: no layout takes less.
    """

    stream: int
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    arena_bytes: int
    bound_bytes: int


class RequestPlanner:
    """Reads what was recorded on one device.

    Args:
        list_blocks: the blocks that are handed out now, in the form of what is recorded.
    """

    def __init__(self, list_blocks: Callable[[], Any]) -> None:
        self._list_blocks = list_blocks
        self._steps: dict[tuple[int, tuple[int, ...]], list[int]] = {}  # the ends, by stream and sizes
        self._planned: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = {}
        self.forget()

    def forget(self) -> None:
        """Something was not recorded: what lies before it tells nothing about what comes after."""
        self._now: dict[int, Requests] | None = None
        self._last: dict[int, Requests] = {}
        self._there: dict[int, tuple[int, Requests, int]] = {}  # by serial: stream, its requests, which one

    def read(self, events: Any) -> list[StreamPlan]:
        """Go on with what was recorded since the last time. Returns plans that are new.

        Cost: searches a layout for each of them, up to some seconds for ten thousand requests.
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
                self._there[serial] = stream, requests, len(requests.sizes)
                requests.sizes.append(nbytes)
                requests.ends.append(UNKNOWN)
                requests.segments.append(segment)
            elif nbytes == 0 and serial in self._there:
                self._give(*self._there.pop(serial))
        return found

    def _give(self, stream: int, requests: Requests, place: int) -> None:
        end = len(requests.sizes)
        if self._now is not None and self._now.get(stream) is not requests:
            end += len(self._now[stream].sizes) if stream in self._now else 0
        requests.ends[place] = end

    def _end_step(self, now: dict[int, Requests]) -> list[StreamPlan]:
        """The step before is known to the end now, and this one up to here."""
        for stream, before in self._last.items():
            count, is_alike = len(before.sizes), stream in now and now[stream].sizes == before.sizes
            ends = [end if end and (end <= count or is_alike) else OUTLIVES for end in before.ends]
            self._remember((stream, tuple(before.sizes)), ends)
        for serial in [serial for serial, (_, requests, _) in self._there.items() if requests not in now.values()]:
            del self._there[serial]
        found = []
        for stream, requests in now.items():
            kind = stream, tuple(requests.sizes)
            if kind in self._steps:
                self._remember(kind, requests.ends)
                if self._planned.get(kind) != tuple(self._steps[kind]):
                    self._planned[kind] = tuple(self._steps[kind])
                    found.append(make_plan(stream, requests.sizes, self._keep_apart(kind, requests)))
        return found

    def _keep_apart(self, kind: tuple[int, tuple[int, ...]], requests: Requests) -> list[int]:
        """The ends of requests, and OUTLIVES for those that lay beside what stays."""
        ends = self._steps[kind]
        leaving = {
            serial for serial, (_, whose, place) in self._there.items() if whose is requests and ends[place] != OUTLIVES
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
    """The end of a block that has come again."""
    return known if end == UNKNOWN else OUTLIVES if OUTLIVES in (known, end) else max(known, end)


def make_plan(stream: int, sizes: Sequence[int], ends: Sequence[int]) -> StreamPlan:
    """Lay out the requests of one kind of step; those that are there when they come again are left to the pool."""
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
