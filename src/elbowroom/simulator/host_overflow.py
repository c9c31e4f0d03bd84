"""Models the disk as overflow of the host, as the runtime uses it.

    device ==link==> host              while there is room, in FIFO order
    device ==link==> [half|half] ==disk==> spill file      after that; the program waits until all is written

The program waits while the disk reads or writes, so the disk has one lane without contention. Only the last transfer of
a reload, from host to device, overlaps with the program. A copy stays in its tier. Not modelled: fragmentation of the
host's memory (`tiers.pinned`), and the capacity of the disk.
"""

from __future__ import annotations

import dataclasses

from elbowroom.cost.transfers import count_least_host_bytes, count_piece_bytes
from elbowroom.ir.costs import Costs
from elbowroom.ir.hardware import Link


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """Treatment of copies when the host is full.

    Attributes:
        disk: the link from the host to the disk.
        host_bytes: capacity of the host.
        host_room_bytes: part of it for copies, without the staging buffer of the disk.
        piece_bytes: bytes staged at a time.
    """

    disk: Link
    host_bytes: int
    host_room_bytes: int
    piece_bytes: int


def find_overflow(costs: Costs, host_bytes: int | None) -> Overflow | None:
    """Return the treatment of copies beyond `host_bytes`; None without such a limit, or without a disk.

    A host that is too small to stage copies has no disk behind it: `host_bytes` limits all copies then.
    """
    if host_bytes is None or not costs.further_links or host_bytes < count_least_host_bytes():
        return None
    piece_bytes = count_piece_bytes(host_bytes)
    return Overflow(
        disk=costs.further_links[0],
        host_bytes=host_bytes,
        host_room_bytes=host_bytes - 2 * piece_bytes,
        piece_bytes=piece_bytes,
    )


def find_host_bytes(room_bytes: int) -> int:
    """Return the smallest host with this much room for copies beside the staging buffer of the disk."""
    host_bytes, larger = 0, room_bytes + count_least_host_bytes()
    while host_bytes < larger:
        host_bytes, larger = larger, room_bytes + 2 * count_piece_bytes(larger)
    return host_bytes
