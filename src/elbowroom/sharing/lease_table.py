"""Lease table: the leases of all jobs on one device, and the decisions on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from elbowroom._family import get
from elbowroom.errors import InternalError
from elbowroom.sharing import policies
from elbowroom.sharing.demand import Demand
from elbowroom.sharing.job_record import JobRecord

EPSILON = 1e-9
"""Seconds by which sums of times may be off."""

Allot = Callable[[Sequence[Demand], int], dict[int, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Remainder:
    """Bytes that a process may hold whose connection is gone."""

    pid: int
    job: str
    name: str
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class NewLease:
    """A lease that a decision has granted: its job, epoch and bytes."""

    client: int
    epoch: int
    nbytes: int


class LeaseTable:
    """Jobs with their leases, and what else is taken of the device.

    Args:
        device_bytes: to lease.
        policy: member of `sharing.policies`.
        quantum_seconds: as in `BrokerOptions`.

    Attributes:
        jobs: by client.
        remainders: of processes without a connection.
        outside_bytes: taken by programs that do not know of the broker.
        preempts: whether the policy pauses jobs for others.

    Raises:
        UnknownMember: there is no such policy.
    """

    def __init__(self, device_bytes: int, policy: str, quantum_seconds: float) -> None:
        self.jobs: dict[int, JobRecord] = {}
        self.remainders: list[Remainder] = []
        self.outside_bytes = 0
        self._device_bytes = device_bytes
        self._policy = policy
        self._quantum_seconds = quantum_seconds
        self._allot: Allot = get(policies, policy, "allot")
        self.preempts: bool = get(policies, policy, "PREEMPTS", True)
        self._targets: dict[int, int] = {}
        self._flags: object = None
        self._due: JobRecord | None = None  # in the last decision
        self._turn = -math.inf  # time at which the last due job was admitted

    @property
    def other_bytes(self) -> int:
        """Bytes that processes without a connection, and other programs, may hold."""
        return sum(each.nbytes for each in self.remainders) + self.outside_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody may hold; negative if jobs or other programs hold more than they were granted."""
        return self._device_bytes - self.other_bytes - sum(job.held_bytes for job in self.jobs.values())

    def remove(self, client: int) -> JobRecord | None:
        """Remove a job and its lease. Return it, if there was one."""
        self._targets.pop(client, None)
        return self.jobs.pop(client, None)

    def find_stuck(self) -> JobRecord | None:
        """Return a job without which others could run, if no job runs and none ever can; None otherwise.

        It is so if jobs have joined with bytes that do not leave, and each needs more than all of them leave free.
        """
        jobs = self.jobs.values()
        if any(job.lease_bytes or job.is_silent or job.is_resting or len(job.unconfirmed) > 1 for job in jobs):
            return None
        free_bytes = self._device_bytes - sum(job.residue_bytes for job in jobs)
        if any(job.floor_bytes - job.residue_bytes <= free_bytes for job in jobs):
            return None
        return max((job for job in jobs if job.residue_bytes), key=lambda each: each.arrival, default=None)

    def has_turned(self, now: float) -> bool:
        """Return True if time or steps have changed who is due or protected since the last decision."""
        return self._list_flags(now) != self._flags

    def next_deadline(self, now: float) -> float | None:
        """Return the next time at which a job becomes due or loses its protection; None if no job waits."""
        if not self.preempts or all(job.lease_bytes or job.is_resting for job in self.jobs.values()):
            return None
        times = [self._turn, *(job.since for job in self.jobs.values())]
        times = [each + self._quantum_seconds for each in times]
        return min((each for each in times if each > now), default=None)

    def decide(self, now: float) -> list[NewLease]:
        """Ask the policy, and move towards its answer. Return the leases that this grants."""
        active = [job for job in self.jobs.values() if not job.is_silent]
        taken_bytes = self.other_bytes + sum(job.residue_bytes for job in active)
        taken_bytes += sum(job.held_bytes for job in self.jobs.values() if job.is_silent)
        capacity_bytes = max(0, self._device_bytes - taken_bytes)
        awake = [job for job in active if not job.is_resting]
        share_bytes = capacity_bytes // max(1, len(awake))
        quantum = self._quantum_seconds if self.preempts else 0.0
        due = self._find_due(now)
        demands = [job.make_demand(now, quantum, share_bytes, is_due=job is due) for job in awake]
        fitting = [each for each in demands if each.floor_bytes <= capacity_bytes]
        found = self._allot(fitting, capacity_bytes) if fitting else {}
        if due is not None and due.client not in found:  # then the jobs before it must not be followed by others
            fitting = [each for each in fitting if each.is_running or each.is_due]
            found = self._allot(fitting, capacity_bytes) if fitting else {}
        self._due = due
        self._check(fitting, found, capacity_bytes)
        self._targets = {job.client: found[job.client] + job.residue_bytes if job.client in found else 0
                         for job in active}  # fmt: skip
        self._flags = self._list_flags(now)
        return self.settle(now)

    def settle(self, now: float) -> list[NewLease]:
        """Shrink leases, and grant what is free, towards the policy's last answer. Return the leases granted."""
        granted = []
        for client, target in self._targets.items():
            if target < self.jobs[client].lease_bytes:
                granted.append(self._grant(self.jobs[client], target, now))
        free_bytes = self.free_bytes
        growing = [self.jobs[client] for client, target in self._targets.items()
                   if target > self.jobs[client].lease_bytes]  # fmt: skip
        for job in sorted(growing, key=lambda each: (each.lease_bytes > 0, each.since, each.arrival)):
            within_bytes = job.held_bytes + max(0, free_bytes)
            nbytes = self._targets[job.client]
            if nbytes > within_bytes:
                # A waiting job starts with less. A running job grows once, as each change is planned anew.
                points = [each.nbytes for each in job.front if job.floor_bytes <= each.nbytes <= within_bytes]
                can_start = not job.lease_bytes and job.floor_bytes <= within_bytes
                nbytes = max([*points, job.floor_bytes]) if can_start else 0
            if nbytes:
                free_bytes -= max(0, nbytes - job.held_bytes)
                granted.append(self._grant(job, nbytes, now))
        return granted

    def _find_due(self, now: float) -> JobRecord | None:
        """Return the job that has waited longest, if for a quantum, and if no due job was admitted in the last one."""
        waiting = [job for job in self.jobs.values() if not job.lease_bytes and not job.is_silent
                   and not job.is_resting]  # fmt: skip
        first = min(waiting, key=lambda each: (each.since, each.arrival), default=None)
        if not self.preempts or now - self._turn < self._quantum_seconds - EPSILON:
            return None
        if first is None or now - first.since < self._quantum_seconds - EPSILON:
            return None
        return first

    def _list_flags(self, now: float) -> object:
        """Return what may change a decision though no job has come, gone or changed."""
        if (due := self._find_due(now)) is None:
            return None
        return due.client, [job.client for job in self.jobs.values() if job.is_protected(now, self._quantum_seconds)]

    def _check(self, demands: Sequence[Demand], found: dict[int, int], capacity_bytes: int) -> None:
        floors = {each.job: each.floor_bytes for each in demands}
        if sum(found.values()) > capacity_bytes or any(nbytes < floors[job] for job, nbytes in found.items()):
            raise InternalError(f"the policy {self._policy} allots {found} of {capacity_bytes} bytes")

    def _grant(self, job: JobRecord, nbytes: int, now: float) -> NewLease:
        if nbytes and job is self._due:
            self._due = None
            self._turn = now
        return NewLease(job.client, job.grant(nbytes, now), nbytes)
