"""A stream of requests, as an allocator gets it that knows nothing of lifetimes; and pools to serve it.

    take a, take b, give a, take c, ...      of buffers: what ends at a time goes before what begins there

A pool is asked for bytes and hands out addresses. What it takes from the device for a stream is compared with the arena
of a layout of the same buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elbowroom.ir.buffers import Buffer
from elbowroom.layout.pools import Pool


def list_requests(buffers: Sequence[Buffer]) -> Iterator[tuple[bool, Buffer]]:
    """Whether each request takes, and for which buffer; two iterations where some buffers wrap."""
    events = sorted(
        event
        for place, buffer in enumerate(buffers)
        for event in ((buffer.lower, True, place), (buffer.upper, False, place))
    )
    there: set[int] = set()
    for _ in range(2 if any(buffer.upper < buffer.lower for buffer in buffers) else 1):
        for _, takes, place in events:
            if takes:
                there.add(place)
                yield True, buffers[place]
            elif place in there:
                there.remove(place)
                yield False, buffers[place]


def serve(buffers: Sequence[Buffer], pool: Pool) -> int:
    """What a pool has taken from the device at the end of a stream; it gives nothing back on the way."""
    addresses: dict[int, int] = {}
    for takes, buffer in list_requests(buffers):
        if takes:
            addresses[buffer.id] = pool.take(buffer.nbytes)
        else:
            pool.give(addresses.pop(buffer.id))
    return pool.reserved_bytes
