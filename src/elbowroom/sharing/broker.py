"""Broker: leases the bytes of one device to jobs. Events come in with their time, effects go out.

    lease grows     from the moment it is granted, the larger amount counts as taken
    lease shrinks   the former amount counts as taken until the job confirms, at its next step boundary

So the bytes that jobs may hold never exceed the device because of a grant. Bytes whose holder has vanished without a
word count as taken until its process is gone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from elbowroom.errors import UsageError
from elbowroom.sharing.clock import BrokerClock
from elbowroom.sharing.job_record import JobRecord
from elbowroom.sharing.lease_table import LeaseTable, NewLease, Remainder
from elbowroom.sharing.messages import (
    BadMessage,
    FromBroker,
    FromJob,
    FrontUpdate,
    Heartbeat,
    JobStatus,
    JoinRequest,
    LeaseConfirmed,
    LeaseGrant,
    LeaveNotice,
    RefusalNotice,
    RestNotice,
    StatusReply,
    StatusRequest,
    WaitNotice,
    decode_message,
)
from elbowroom.sharing.waiting import explain_wait
from elbowroom.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class SendMessage:
    """Send a message to a client."""

    client: int
    message: FromBroker


@dataclasses.dataclass(frozen=True, slots=True)
class DropClient:
    """Close the connection of a client."""

    client: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class EndProcess:
    """End a process that has been silent for too long, so that its bytes come back."""

    pid: int


Effect = SendMessage | DropClient | EndProcess


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """Options of a broker.

    Attributes:
        device_bytes: to lease.
        policy: member of `sharing.policies`.
        quantum_seconds: after which a waiting job is due, and for which an admitted job is not paused.
        heartbeat_seconds: after which a job without a message is silent.
        end_seconds: after which the process of a silent job is ended; None for never.
    """

    device_bytes: int
    policy: str = "marginal"
    quantum_seconds: float = 30.0
    heartbeat_seconds: float = 10.0
    end_seconds: float | None = None


class Broker:
    """State machine of the broker.

    Times are seconds of any clock (`BrokerClock`).

    Attributes:
        leases: of all jobs.

    Raises:
        UnknownMember: there is no such policy.
        UsageError: there are no bytes to lease.
    """

    def __init__(self, options: BrokerOptions) -> None:
        if options.device_bytes < 1:
            raise UsageError(f"a broker needs bytes to lease, not {options.device_bytes}")
        self.options = options
        self.leases = LeaseTable(options.device_bytes, options.policy, options.quantum_seconds)
        self._pids: dict[int, int] = {}
        self._expected: dict[int, int] = {}
        self._sent: dict[int, int] = {}
        self._notices: dict[int, float] = {}  # times at which waiting jobs were told why
        self._arrivals = 0
        self._clock = BrokerClock(options.heartbeat_seconds)
        self._effects: list[Effect] = []

    # -- events -----------------------------------------------------------------------------------------------------

    def connect(self, client: int, pid: int, now: float) -> list[Effect]:
        """Take a new connection from a process."""
        self._clock.set(now)
        self._pids[client] = pid
        self._expected[client] = self._sent[client] = 0
        return self._flush()

    def receive_line(self, client: int, line: bytes, now: float) -> list[Effect]:
        """Take a line from a client. A client that breaks the protocol is dropped."""
        try:
            message = decode_message(line)
        except BadMessage as error:
            self._clock.set(now)
            return self.refuse(client, str(error)) if client in self._expected else self._flush()
        return self.receive(client, message, now)

    def receive(self, client: int, message: FromJob | FromBroker, now: float) -> list[Effect]:
        """Take a message from a client."""
        self._clock.set(now)
        if client not in self._expected:
            return self._flush()  # dropped a moment ago
        if message.sequence != self._expected[client]:
            return self.refuse(client, f"message {message.sequence} came where {self._expected[client]} was expected")
        self._expected[client] += 1
        job = self.jobs.get(client)
        if isinstance(message, StatusRequest):
            self._send(client, self.describe(self._count_sent(client)))
        elif isinstance(message, JoinRequest):
            if job is not None:
                return self.refuse(client, "this connection has a job already")
            return self._join(client, message)
        elif job is None:
            return self.refuse(client, f"{type(message).__name__} came before JoinRequest")
        else:
            return self._receive_from_job(job, message)
        return self._flush()

    def disconnect(self, client: int, now: float) -> list[Effect]:
        """Take the end of a connection. Bytes of a job that did not say goodbye stay taken until its process ends."""
        self._clock.set(now)
        self._forget(client)
        return self._decide()

    def end_process(self, pid: int, now: float) -> list[Effect]:
        """Take the end of a process: nothing of it is left on the device."""
        self._clock.set(now)
        for client in [client for client, job in self.jobs.items() if job.pid == pid]:
            self._effects.append(DropClient(client, "its process has ended"))
            self._forget(client)
        self.leases.remainders = [each for each in self.remainders if each.pid != pid]
        return self._decide()

    def restore(self, held: Remainder) -> None:
        """Count bytes that an earlier broker leased to a job, until that joins or its process ends."""
        self.remainders.append(held)

    def set_outside(self, nbytes: int, now: float) -> list[Effect]:
        """Take a new measurement of the bytes that other programs hold on the device."""
        self._clock.set(now)
        if nbytes == self.leases.outside_bytes:
            return self._flush()
        self.leases.outside_bytes = nbytes
        return self._decide()

    def tick(self, now: float) -> list[Effect]:
        """Take the passing of time."""
        self._clock.set(now)
        has_changed = False
        for job in self.jobs.values():
            silence = self._clock.listening - job.heard
            if silence > self.options.heartbeat_seconds and not job.is_silent:
                job.is_silent = has_changed = True
            may_end = self.options.end_seconds is not None and silence > self.options.end_seconds
            if job.is_silent and may_end and not job.is_ended:
                job.is_ended = True
                self._effects.append(EndProcess(job.pid))
        return self._decide() if has_changed or self.leases.has_turned(self._clock.now) else self._flush()

    def next_deadline(self) -> float | None:
        """Return the next time at which `tick` may change who runs; None if only other events can."""
        return self.leases.next_deadline(self._clock.now)

    def describe(self, sequence: int = 0) -> StatusReply:
        """Return the state of the broker and of all jobs."""
        rows = [job.describe(self._clock.now) for job in self.jobs.values()]
        rows += [
            JobStatus(
                name=each.name, pid=each.pid, state="disconnected", lease_bytes=0, held_bytes=each.nbytes,
                floor_bytes=0, wanted_bytes=0, steps=0, step_seconds=0.0, lost_share=0.0, waiting_seconds=0.0,
            )
            for each in self.remainders
        ]  # fmt: skip
        return StatusReply(
            sequence=sequence, policy=self.options.policy, device_bytes=self.options.device_bytes,
            outside_bytes=self.leases.outside_bytes, free_bytes=max(0, self.free_bytes), jobs=tuple(rows),
        )  # fmt: skip

    @property
    def jobs(self) -> dict[int, JobRecord]:
        """Jobs by client."""
        return self.leases.jobs

    @property
    def remainders(self) -> list[Remainder]:
        """Bytes of processes without a connection."""
        return self.leases.remainders

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody may hold."""
        return self.leases.free_bytes

    # -- messages ---------------------------------------------------------------------------------------------------

    def _join(self, client: int, message: JoinRequest) -> list[Effect]:
        pid = self._pids[client]
        for each in [each for each in self.jobs.values() if (each.pid, each.job) == (pid, message.job)]:
            self._effects.append(DropClient(each.client, "its job has joined again"))
            self._forget(each.client)
        job = JobRecord(
            client=client, pid=pid, name=message.name, job=message.job, arrival=self._arrivals, floor_bytes=1, front=(),
            weight=message.weight, priority=message.priority, steps_left=message.steps_left,
            lease_bytes=message.lease_bytes, unconfirmed=[(0, max(message.held_bytes, message.lease_bytes))],
            residue_bytes=0 if message.lease_bytes else message.held_bytes, since=self._clock.now,
            heard=self._clock.listening, is_resting=message.rests,
        )  # fmt: skip
        job.replace_front(max(message.floor_bytes, job.residue_bytes), message.points, message.steps_left)
        self._arrivals += 1
        self.leases.remainders = [each for each in self.remainders if (each.pid, each.job) != (pid, message.job)]
        self.jobs[client] = job
        return self._refuse_giant(job) or self._decide()

    def _refuse_giant(self, job: JobRecord) -> list[Effect]:
        """Drop a job that can never run."""
        if job.floor_bytes <= self.options.device_bytes:
            return []
        return self.refuse(
            job.client, f"{job.name} needs at least {format_bytes(job.floor_bytes)}, and the broker has "
            f"{format_bytes(self.options.device_bytes)} in all",
        )  # fmt: skip

    def _receive_from_job(self, job: JobRecord, message: FromJob | FromBroker) -> list[Effect]:
        job.heard = self._clock.listening
        was_silent, job.is_silent = job.is_silent, False
        match message:
            case Heartbeat():
                job.steps = max(job.steps, message.steps)
                job.step_seconds = message.step_seconds
                job.used_bytes = max(job.used_bytes, message.used_bytes)
            case FrontUpdate():
                job.replace_front(message.floor_bytes, message.points, message.steps_left)
                return self._refuse_giant(job) or self._decide()
            case LeaseConfirmed():
                floor_bytes = job.floor_bytes
                if not job.confirm(message.epoch, message.held_bytes):
                    return self.refuse(job.client, f"there is no lease {message.epoch} to confirm")
                if job.floor_bytes != floor_bytes or not job.lease_bytes:
                    return self._refuse_giant(job) or self._decide()
                self._grant(self.leases.settle(self._clock.now))
                return self._flush()
            case RestNotice():
                job.is_resting, job.since = message.rests, self._clock.now
                return self._decide()
            case LeaveNotice():
                self.leases.remove(job.client)
                return self._decide()
            case _:
                return self.refuse(job.client, f"{type(message).__name__} is not for the broker")
        return self._decide() if was_silent or self.leases.has_turned(self._clock.now) else self._flush()

    # -- decisions --------------------------------------------------------------------------------------------------

    def _decide(self) -> list[Effect]:
        self._grant(self.leases.decide(self._clock.now))
        if (stuck := self.leases.find_stuck()) is not None:
            return self.refuse(
                stuck.client, f"{stuck.name} holds {format_bytes(stuck.residue_bytes)} and waits for "
                f"{format_bytes(stuck.floor_bytes)}, but no job can start beside what the waiting ones hold: ask for "
                "the lease before you build the model (elbowroom.wait_for_lease)",
            )  # fmt: skip
        self._tell_waiting()
        return self._flush()

    def _grant(self, granted: Sequence[NewLease]) -> None:
        for lease in granted:
            self._notices.pop(lease.client, None)
            number = self._count_sent(lease.client)
            self._send(lease.client, LeaseGrant(sequence=number, epoch=lease.epoch, nbytes=lease.nbytes))

    def _tell_waiting(self) -> None:
        for job in self.jobs.values():
            is_told = self._clock.now - self._notices.get(job.client, -math.inf) < self.options.quantum_seconds
            makes_room = len(job.unconfirmed) > 1  # it was paused a moment ago, and is told once it has let go
            if job.lease_bytes or job.is_silent or job.is_resting or is_told or makes_room:
                continue
            self._notices[job.client] = self._clock.now
            text = explain_wait(
                job,
                list(self.jobs.values()),
                self.remainders,
                self.leases.outside_bytes,
                self.options.quantum_seconds if self.leases.preempts else None,
            )
            self._send(job.client, WaitNotice(sequence=self._count_sent(job.client), text=text))

    # -- connections ------------------------------------------------------------------------------------------------

    def refuse(self, client: int, text: str) -> list[Effect]:
        """Drop a client, and tell it why."""
        self._send(client, RefusalNotice(sequence=self._count_sent(client), text=text))
        self._effects.append(DropClient(client, text))
        self._forget(client)
        return self._decide()

    def _forget(self, client: int) -> None:
        job = self.leases.remove(client)
        if job is not None and job.held_bytes:
            self.remainders.append(Remainder(job.pid, job.job, job.name, job.held_bytes))
        for table in (self._pids, self._expected, self._sent, self._notices):
            table.pop(client, None)

    def _send(self, client: int, message: FromBroker) -> None:
        self._effects.append(SendMessage(client, message))

    def _count_sent(self, client: int) -> int:
        self._sent[client] = self._sent.get(client, 0) + 1
        return self._sent[client] - 1

    def _flush(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects
