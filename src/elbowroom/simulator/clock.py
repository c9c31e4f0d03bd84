"""Models a link on a virtual clock: one lane per direction, one transfer at a time, in FIFO order."""

from __future__ import annotations

from elbowroom.ir.hardware import Link


class Lanes:
    """Computes when transfers over one link end.

    Args:
        link: latencies and bandwidths. A half-duplex link has a single lane.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._out_free = self._back_free = 0.0

    def shift(self, seconds: float) -> None:
        """Move the origin of time `seconds` ahead."""
        self._out_free -= seconds
        self._back_free -= seconds

    def send(self, nbytes: int, now: float) -> float:
        """Start a transfer down at `now`, or once the lane is free. Return its end."""
        link = self._link
        begin = max(now, self._out_free, self._back_free if link.half_duplex else 0.0)
        self._out_free = begin + link.out_latency_seconds + nbytes / link.out_bytes_per_second
        return self._out_free

    def fetch(self, nbytes: int, now: float) -> float:
        """Start a transfer up at `now`, or once the lane is free. Return its end."""
        link = self._link
        begin = max(now, self._back_free, self._out_free if link.half_duplex else 0.0)
        self._back_free = begin + link.back_latency_seconds + nbytes / link.back_bytes_per_second
        return self._back_free

    def send_through(self, disk: Link, piece_bytes: int, nbytes: int, now: float) -> float:
        """Move bytes down and on to the disk, piece by piece. Return when all are written.

        The link transfers the next piece while the disk writes one, so the slower of the two limits the throughput.
        """
        link = self._link
        begin = max(now, self._out_free, self._back_free if link.half_duplex else 0.0)
        pieces = -(-nbytes // piece_bytes)
        last_bytes = nbytes - (pieces - 1) * piece_bytes
        copied = pieces * link.out_latency_seconds + nbytes / link.out_bytes_per_second
        written = pieces * disk.out_latency_seconds + nbytes / disk.out_bytes_per_second
        first = link.out_latency_seconds + min(piece_bytes, nbytes) / link.out_bytes_per_second
        last = disk.out_latency_seconds + last_bytes / disk.out_bytes_per_second
        self._out_free = begin + max(first + written, copied + last)
        return self._out_free

    def fetch_through(self, disk: Link, piece_bytes: int, nbytes: int, now: float) -> tuple[float, float]:
        """Move bytes from the disk and up, piece by piece. Return when all are read, and when all have arrived."""
        link = self._link
        lane = max(self._back_free, self._out_free if link.half_duplex else 0.0)
        pieces = -(-nbytes // piece_bytes)
        last_bytes = nbytes - (pieces - 1) * piece_bytes
        copied = pieces * link.back_latency_seconds + nbytes / link.back_bytes_per_second
        read = now + (pieces * disk.back_latency_seconds + nbytes / disk.back_bytes_per_second)
        first = disk.back_latency_seconds + min(piece_bytes, nbytes) / disk.back_bytes_per_second
        last = link.back_latency_seconds + last_bytes / link.back_bytes_per_second
        self._back_free = max(max(read, lane) + last, max(now + first, lane) + copied)
        return read, self._back_free
