"""One link as lanes on a virtual clock: one transfer at a time in each direction, first come first served."""

from __future__ import annotations

from elbowroom.ir.hardware import Link


class Lanes:
    """When transfers over one link end.

    Args:
        link: its latencies and bandwidths; one lane for both directions if it is half-duplex.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._out_free = self._back_free = 0.0

    def send(self, nbytes: int, now: float) -> float:
        """Begin moving bytes down at `now` or when the lane is free; returns when they have arrived."""
        link = self._link
        begin = max(now, self._out_free, self._back_free if link.half_duplex else 0.0)
        self._out_free = begin + link.out_latency_seconds + nbytes / link.out_bytes_per_second
        return self._out_free

    def fetch(self, nbytes: int, now: float) -> float:
        """Begin moving bytes up at `now` or when the lane is free; returns when they have arrived."""
        link = self._link
        begin = max(now, self._back_free, self._out_free if link.half_duplex else 0.0)
        self._back_free = begin + link.back_latency_seconds + nbytes / link.back_bytes_per_second
        return self._back_free
