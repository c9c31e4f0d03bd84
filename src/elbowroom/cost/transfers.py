"""Duration of transfers between two neighbouring tiers."""

from __future__ import annotations

from elbowroom.errors import TraceError
from elbowroom.ir.hardware import Link

STAGING_BYTES = 32 << 20
"""Host memory for staging copies to the disk: two halves, each large enough for full speed on any disk."""

LEAST_PIECE_BYTES = 1 << 20
"""Smallest staging half: with less, the latencies of link and disk take most of the time, in the end all of it."""


def count_piece_bytes(host_bytes: int, staging_bytes: int = STAGING_BYTES) -> int:
    """Return the bytes of a staging half; both halves take at most `staging_bytes` and a quarter of the host's memory,
    but no half is smaller than LEAST_PIECE_BYTES.

    The disk works on one half while the device copies the other.
    """
    return max(min(staging_bytes, host_bytes // 4) // 2, min(LEAST_PIECE_BYTES, staging_bytes // 2))


def count_least_host_bytes() -> int:
    """Return the smallest host from which copies go on to the disk: it has room for both staging halves."""
    return 2 * LEAST_PIECE_BYTES


def offload_seconds(link: Link, nbytes: int) -> float:
    """Return the seconds to offload a block of `nbytes` on an idle link.

    Raises:
        TraceError: the link's bandwidth in this direction is 0.
    """
    return _move_seconds(link, nbytes, link.out_latency_seconds, link.out_bytes_per_second)


def reload_seconds(link: Link, nbytes: int) -> float:
    """Return the seconds to reload a block of `nbytes` on an idle link.

    Raises:
        TraceError: the link's bandwidth in this direction is 0.
    """
    return _move_seconds(link, nbytes, link.back_latency_seconds, link.back_bytes_per_second)


def drag_seconds(link: Link, nbytes: int) -> float:
    """Return the seconds that compute loses while `nbytes` are moved in either direction."""
    return link.drag_seconds_per_byte * nbytes


def _move_seconds(link: Link, nbytes: int, latency_seconds: float, bytes_per_second: float) -> float:
    if nbytes <= 0:
        return 0.0
    if bytes_per_second <= 0:
        raise TraceError(
            f"the link from {link.upper} to {link.lower} moves 0 bytes per second; measure the machine again with "
            "`elbowroom probe`"
        )
    return latency_seconds + nbytes / bytes_per_second
