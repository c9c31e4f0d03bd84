"""Lanes of one rank on a virtual clock: compute, which may wait, and the network, one collective after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from elbowroom.cost.collectives import count_sent_bytes, price_collective
from elbowroom.ir.network import CollectiveKind, Network
from elbowroom.ir.parallelism import CollectiveTotal, Parallelism


class Call(NamedTuple):
    """One collective under way from `begin` to `end`, in seconds since the step began."""

    kind: CollectiveKind
    nbytes: int
    begin: float
    end: float


class ComputeLane:
    """Entries of a step one after another, with waits between them.

    Args:
        begin_seconds: begin of each entry without waits, and the end of the last one.

    Attributes:
        late: seconds of all waits so far. Waits come in order of their entries.
    """

    def __init__(self, begin_seconds: Sequence[float]) -> None:
        self._begins = begin_seconds
        self.late = 0.0

    def find_time(self, tick: int) -> float:
        """Return when an entry begins, at or after the last wait."""
        return self._begins[tick] + self.late

    def wait(self, tick: int, until: float) -> None:
        """Let an entry begin no earlier than `until`."""
        seconds = until - self.find_time(tick)
        if seconds > 0.0:
            self.late += seconds


class NetworkLane:
    """Collectives of one rank, in the order in which they are issued.

    Args:
        ranks: that take part in each collective.

    Attributes:
        calls: collectives so far.
    """

    def __init__(self, network: Network, parallelism: Parallelism, ranks: int) -> None:
        self._network, self._algorithm = network, parallelism.algorithm
        self._ranks = ranks
        self._free = 0.0
        self.calls: list[Call] = []

    def start(self, kind: CollectiveKind, nbytes: int, now: float) -> float:
        """Issue a collective at `now`; return when it is over."""
        if self._ranks == 1:
            return now
        begin = max(now, self._free)
        self._free = begin + price_collective(self._network, kind, nbytes, self._ranks, self._algorithm)
        self.calls.append(Call(kind, nbytes, begin, self._free))
        return self._free

    def list_totals(self) -> tuple[CollectiveTotal, ...]:
        """Return the totals by kind."""
        return tuple(
            CollectiveTotal(
                kind=kind,
                count=len(calls),
                nbytes=sum(call.nbytes for call in calls),
                seconds=sum(call.end - call.begin for call in calls),
            )
            for kind in CollectiveKind
            if (calls := [call for call in self.calls if call.kind is kind])
        )

    def count_sent(self) -> int:
        """Return the bytes that this rank sends."""
        return sum(count_sent_bytes(call.kind, call.nbytes, self._ranks) for call in self.calls)
