"""Job record: all that the broker knows of one connected job."""

from __future__ import annotations

import dataclasses
import enum

from elbowroom.sharing.demand import Demand, FrontPoint, make_front
from elbowroom.sharing.messages import JobStatus, Triples

COLD_SLOWDOWN = 2.0
"""Steps at the floor of a job without a front, relative to those within its share, until it is known."""


class JobState(enum.StrEnum):
    """State of a job that has a connection."""

    RUNNING = "running"
    WAITING = "waiting"
    RESTING = "resting"
    SILENT = "silent"


@dataclasses.dataclass
class JobRecord:
    """A job of the broker.

    Attributes:
        client: number of its connection.
        job: as in `JoinRequest`.
        arrival: place in the order in which jobs joined.
        floor_bytes: the least bytes within which it runs: as it said, or as measured.
        front: empty until a step is known.
        lease_bytes: latest lease; 0 while it waits.
        unconfirmed: (epoch, bytes) of the last confirmed lease and of all that were granted since, in order.
        residue_bytes: held even while it waits.
        used_bytes: peak that the job has measured since its last confirmation.
        since: time at which it was admitted, paused, or joined.
        is_ended: its process has been told to end.
        is_resting: it needs no lease for now.
        steps_at_start: steps made when it was admitted.
        heard: seconds for which the broker had listened when its last message came.
        expected: number of its next message.
    """

    client: int
    pid: int
    name: str
    job: str
    arrival: int
    floor_bytes: int
    front: tuple[FrontPoint, ...]
    weight: float
    priority: int
    steps_left: int | None
    lease_bytes: int
    unconfirmed: list[tuple[int, int]]
    residue_bytes: int
    since: float
    heard: float
    used_bytes: int = 0
    steps: int = 0
    steps_at_start: int = 0
    step_seconds: float = 0.0
    is_silent: bool = False
    is_ended: bool = False
    is_resting: bool = False

    @property
    def epoch(self) -> int:
        """Number of the latest lease."""
        return self.unconfirmed[-1][0]

    @property
    def held_bytes(self) -> int:
        """The most bytes that the job may hold now."""
        nbytes = self.unconfirmed[-1][1] if len(self.unconfirmed) == 1 else max(each for _, each in self.unconfirmed)
        return max(self.used_bytes, nbytes)

    @property
    def state(self) -> JobState:
        """State of the job."""
        if self.is_silent:
            return JobState.SILENT
        if self.is_resting:
            return JobState.RESTING
        return JobState.RUNNING if self.lease_bytes else JobState.WAITING

    def grant(self, nbytes: int, now: float) -> int:
        """Record a new lease, and return its epoch."""
        if bool(nbytes) is not bool(self.lease_bytes):
            self.since = now
            self.steps_at_start = self.steps
        self.lease_bytes = nbytes
        self.unconfirmed.append((self.epoch + 1, nbytes))
        return self.epoch

    def confirm(self, epoch: int, held_bytes: int) -> bool:
        """Record that the job keeps within the lease of `epoch`. Return False if there was no such lease.

        The job may say that it holds more than the lease, though not more than it may hold anyway.
        """
        place = next((place for place, (each, _) in enumerate(self.unconfirmed) if each == epoch), None)
        if place is None:
            return False
        is_latest = place == len(self.unconfirmed) - 1
        granted_bytes = self.unconfirmed[place][1]
        kept_bytes = max(granted_bytes, min(held_bytes, self.held_bytes))
        self.unconfirmed[: place + 1] = [(epoch, kept_bytes)]
        self.used_bytes = 0
        if not self.lease_bytes:
            if is_latest:  # it has moved out what can leave
                self.residue_bytes = kept_bytes
        elif kept_bytes > granted_bytes > 0:
            self.floor_bytes = max(self.floor_bytes, kept_bytes)
        return True

    def replace_front(self, floor_bytes: int, points: Triples, steps_left: int | None) -> None:
        """Record a new front."""
        self.floor_bytes = max(1, floor_bytes)
        self.front = make_front([FrontPoint(nbytes=each[0], step_seconds=each[1], busy_seconds=each[2])
                                 for each in points])  # fmt: skip
        self.steps_left = steps_left

    def is_protected(self, now: float, quantum_seconds: float) -> bool:
        """Return True if the job was admitted a short time ago, or has not made a step since."""
        if not self.lease_bytes:
            return False
        return now - self.since < quantum_seconds - 1e-9 or self.steps == self.steps_at_start

    def make_demand(self, now: float, quantum_seconds: float, share_bytes: int, *, is_due: bool = False) -> Demand:
        """Return what a policy sees: the front above the bytes that the job holds anyway.

        Args:
            share_bytes: asked for by jobs whose front is not known yet.
            is_due: as in `Demand`.
        """
        front = [point for point in self.front if point.nbytes >= self.floor_bytes]
        if not front:
            front = [FrontPoint(nbytes=self.floor_bytes, step_seconds=COLD_SLOWDOWN, busy_seconds=0.0)]
            if not self.front:
                front.append(FrontPoint(nbytes=max(share_bytes, self.floor_bytes + 1), step_seconds=1.0,
                                        busy_seconds=1.0))  # fmt: skip
        elif front[0].nbytes > self.floor_bytes:
            seconds = self._find_slowest()
            front.insert(0, FrontPoint(nbytes=self.floor_bytes, step_seconds=seconds, busy_seconds=seconds))
        waiting_seconds = 0.0 if self.lease_bytes else now - self.since
        return Demand(
            job=self.client,
            front=make_front([dataclasses.replace(point, nbytes=max(1, point.nbytes - self.residue_bytes))
                              for point in front]),
            weight=self.weight,
            priority=self.priority,
            arrival=self.arrival,
            leased_bytes=max(0, self.lease_bytes - self.residue_bytes),
            is_protected=self.is_protected(now, quantum_seconds),
            is_due=is_due,
            waiting_seconds=waiting_seconds,
            steps_left=None if self.steps_left is None else max(0, self.steps_left - self.steps),
        )  # fmt: skip

    def _find_slowest(self) -> float:
        """Return seconds of a step at a floor below the front: somewhat slower than its first point."""
        return 1.05 * self.front[0].step_seconds

    def describe(self, now: float) -> JobStatus:
        """Return the job's row of a status reply."""
        fastest = self.front[-1].step_seconds if self.front else 0.0
        pace = self.make_demand(now, 0.0, self.floor_bytes)
        present = pace.find_pace(self.lease_bytes - self.residue_bytes) if self.lease_bytes and self.front else 0.0
        lost = self.step_seconds / fastest - 1 if fastest and self.step_seconds else 1 / present - 1 if present else 0.0
        return JobStatus(
            name=self.name,
            pid=self.pid,
            state=self.state,
            lease_bytes=self.lease_bytes,
            held_bytes=self.held_bytes,
            floor_bytes=self.floor_bytes,
            wanted_bytes=self.front[-1].nbytes if self.front else 0,
            steps=self.steps,
            step_seconds=self.step_seconds,
            lost_share=max(0.0, lost),
            waiting_seconds=0.0 if self.lease_bytes or self.is_resting else now - self.since,
        )
