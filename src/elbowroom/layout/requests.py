"""Buffers as a sequence of requests to a memory pool, which does not know their lifetimes.

    take a, take b, give a, take c, ...      at equal times, buffers are freed before others are allocated

The memory that a pool reserves for the requests is compared with the arena of a layout of the same buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elbowroom.ir.buffers import Buffer
from elbowroom.layout.pools import Pool


def list_requests(buffers: Sequence[Buffer]) -> Iterator[tuple[bool, Buffer]]:
    """Generate (is allocation, buffer) for each request; two iterations where some buffers wrap."""
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
    """Serve all requests from a pool, and return the bytes that it has reserved at the end."""
    addresses: dict[int, int] = {}
    for takes, buffer in list_requests(buffers):
        if takes:
            addresses[buffer.id] = pool.take(buffer.nbytes)
        else:
            pool.give(addresses.pop(buffer.id))
    return pool.reserved_bytes
