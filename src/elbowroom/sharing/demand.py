"""Demand: the bytes that one job asks of a shared device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FrontPoint:
    """One budget of a job with the step that it allows.

    Attributes:
        nbytes: on the device.
        step_seconds: of a step within them, alone on the device.
        busy_seconds: part of it in which the device computes.
    """

    nbytes: int
    step_seconds: float
    busy_seconds: float


def make_front(points: Sequence[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Return the Pareto front of points: by increasing bytes, each faster than the one before it."""
    front: list[FrontPoint] = []
    for point in sorted(points, key=lambda each: (each.nbytes, each.step_seconds)):
        if not front or point.step_seconds < front[-1].step_seconds:
            front.append(point)
    return tuple(front)


def find_point(front: Sequence[FrontPoint], nbytes: int) -> FrontPoint | None:
    """Return the fastest point of a front within some bytes; None if there is none."""
    return next((point for point in reversed(front) if point.nbytes <= nbytes), None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One job, as a policy sees it.

    Attributes:
        job: number of the job.
        front: at least one point, by increasing bytes and decreasing seconds. The first is the floor of the job.
        weight: worth of the job's time, relative to others.
        priority: jobs of higher priority come first, under the policy `priority`.
        arrival: place in the order in which jobs joined.
        leased_bytes: its present lease; 0 while it waits.
        is_protected: it was admitted a short time ago, so it stays.
        is_due: it has waited longest, and for its time, so it comes before jobs that are not protected.
        waiting_seconds: since it joined or was paused; 0 if it has a lease.
        steps_left: until it ends; None if unknown.
    """

    job: int
    front: tuple[FrontPoint, ...]
    weight: float = 1.0
    priority: int = 0
    arrival: int = 0
    leased_bytes: int = 0
    is_protected: bool = False
    is_due: bool = False
    waiting_seconds: float = 0.0
    steps_left: int | None = None

    @property
    def floor_bytes(self) -> int:
        """The least bytes within which the job runs."""
        return self.front[0].nbytes

    @property
    def most_bytes(self) -> int:
        """Bytes beyond which the job becomes no faster."""
        return self.front[-1].nbytes

    @property
    def is_running(self) -> bool:
        """True if the job has a lease."""
        return self.leased_bytes > 0

    def find_point(self, nbytes: int) -> FrontPoint | None:
        """Return the fastest point within some bytes; None if the floor does not fit."""
        return find_point(self.front, nbytes)

    def find_pace(self, nbytes: int) -> float:
        """Return plain steps per plain step time: 1 at the last point of the front, 0 below the floor."""
        point = self.find_point(nbytes)
        if point is None:
            return 0.0
        return self.front[-1].step_seconds / point.step_seconds if point.step_seconds else 1.0

    def find_load(self, nbytes: int) -> float:
        """Return the share of time in which the job keeps the device busy, from 0 to 1."""
        point = self.find_point(nbytes)
        if point is None:
            return 0.0
        return min(1.0, point.busy_seconds / point.step_seconds) if point.step_seconds else 1.0

    @property
    def plain_seconds_left(self) -> float:
        """Seconds until the job ends at its fastest; infinite if unknown."""
        return math.inf if self.steps_left is None else self.steps_left * self.front[-1].step_seconds


def admit_in_order(demands: Sequence[Demand], capacity_bytes: int, *, skips: bool = True) -> list[Demand]:
    """Return those whose floors fit together, taken in order.

    Args:
        skips: whether smaller jobs may pass a job that does not fit.
    """
    admitted: list[Demand] = []
    left_bytes = capacity_bytes
    for demand in demands:
        if demand.floor_bytes <= left_bytes:
            admitted.append(demand)
            left_bytes -= demand.floor_bytes
        elif not skips:
            break
    return admitted


def sort_by_turn(demands: Sequence[Demand]) -> list[Demand]:
    """Return jobs by turn: protected ones, due ones (longest wait first), running ones, then the rest."""

    def key(demand: Demand) -> tuple[int, float, int]:
        if demand.is_protected:
            return (0, 0.0, demand.arrival)
        if demand.is_due:
            return (1, -demand.waiting_seconds, demand.arrival)
        return (2 if demand.is_running else 3, 0.0, demand.arrival)

    return sorted(demands, key=key)


def list_required(demands: Sequence[Demand], capacity_bytes: int) -> list[Demand]:
    """Return the jobs that must run now, protected and due ones, as far as their floors fit together.

    A due job that does not fit keeps later ones from passing it.
    """
    required = [each for each in sort_by_turn(demands) if each.is_protected or each.is_due]
    return admit_in_order(required, capacity_bytes, skips=False)
