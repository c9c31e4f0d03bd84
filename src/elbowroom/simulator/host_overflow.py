"""Disk behind host: where copies go that the host has no room for, as the runtime does it.

    device ==link==> host              while there is room, first come first served
    device ==link==> [half|half] ==disk==> spill file      after that, and the program waits until all is written

The program stands still for as long as the disk works, whichever way: so the disk has one lane and is never contended
for. Only the last copy of a reload, from the host to the device, goes on beside the program. A copy stays where it
was put. Left out: that the host's room can be in pieces too small for a block (`tiers.pinned`), and the limit of the
disk itself.
"""

from __future__ import annotations

import dataclasses

from elbowroom.cost.transfers import count_piece_bytes
from elbowroom.ir.costs import Costs
from elbowroom.ir.hardware import Link


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """Treatment of copies when the host is full.

    Attributes:
        disk: the link from the host to the disk.
        host_bytes: what the host may hold in all.
        host_room_bytes: for copies; what the disk's bytes pass through is taken off.
        piece_bytes: what passes through at a time.
    """

    disk: Link
    host_bytes: int
    host_room_bytes: int
    piece_bytes: int


def find_overflow(costs: Costs, host_bytes: int | None) -> Overflow | None:
    """Return the treatment of copies beyond `host_bytes`; None without such a limit, or without a disk."""
    if host_bytes is None or not costs.further_links:
        return None
    piece_bytes = count_piece_bytes(host_bytes)
    return Overflow(
        disk=costs.further_links[0],
        host_bytes=host_bytes,
        host_room_bytes=max(0, host_bytes - 2 * piece_bytes),
        piece_bytes=piece_bytes,
    )


def find_host_bytes(room_bytes: int) -> int:
    """The smallest host with so much room for copies beside what the disk's bytes pass through."""
    host_bytes, larger = 0, room_bytes
    while host_bytes < larger:
        host_bytes, larger = larger, room_bytes + 2 * count_piece_bytes(larger)
    return host_bytes
