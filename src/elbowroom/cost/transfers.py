"""Seconds that transfers between two neighbouring tiers take."""

from __future__ import annotations

from elbowroom.errors import TraceError
from elbowroom.ir.hardware import Link

STAGING_BYTES = 32 << 20
"""Host memory that bytes for the disk pass through: large enough for full speed on any disk, twice."""


def count_piece_bytes(host_bytes: int, staging_bytes: int = STAGING_BYTES) -> int:
    """Bytes that go to or from the disk at a time: half of what is set aside for that, at most a quarter of the host's.

    The disk works on one half while the device copies the other.
    """
    return max(min(staging_bytes, host_bytes // 4) // 2, 1)


def offload_seconds(link: Link, nbytes: int) -> float:
    """Seconds to move a block of `nbytes` out, from the upper tier to the lower one, with the link to itself.

    Raises:
        TraceError: the link has no speed in this direction.
    """
    return _move_seconds(link, nbytes, link.out_latency_seconds, link.out_bytes_per_second)


def reload_seconds(link: Link, nbytes: int) -> float:
    """Seconds to move a block of `nbytes` back, from the lower tier to the upper one, with the link to itself.

    Raises:
        TraceError: the link has no speed in this direction.
    """
    return _move_seconds(link, nbytes, link.back_latency_seconds, link.back_bytes_per_second)


def drag_seconds(link: Link, nbytes: int) -> float:
    """Seconds that the compute loses while `nbytes` are moved, either way."""
    return link.drag_seconds_per_byte * nbytes


def _move_seconds(link: Link, nbytes: int, latency_seconds: float, bytes_per_second: float) -> float:
    if nbytes <= 0:
        return 0.0
    if bytes_per_second <= 0:
        raise TraceError(f"the link from {link.upper} to {link.lower} moves 0 bytes per second; probe the machine anew")
    return latency_seconds + nbytes / bytes_per_second
