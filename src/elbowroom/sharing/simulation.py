"""Simulation of the broker on a virtual clock: simulated jobs, and the broker core that the socket server runs.

Jobs share the compute of the device: when the loads of running jobs add up to more than 1, all their steps take that
much longer. So there are two clocks, and jobs run on the second one:

    seconds      arrivals, quanta
    job seconds  pass at 1 / max(1, sum of loads) of that rate; steps, moves of state
"""

from __future__ import annotations

import dataclasses
import functools
import math

from elbowroom.errors import InternalError, UsageError
from elbowroom.sharing.alignment import StepCurve, align
from elbowroom.sharing.broker import Broker, BrokerOptions, DropClient, Effect, SendMessage
from elbowroom.sharing.demand import FrontPoint, find_point
from elbowroom.sharing.job_list import JobList, ListedJob
from elbowroom.sharing.messages import (
    FrontUpdate,
    Heartbeat,
    JoinRequest,
    LeaseConfirmed,
    LeaseGrant,
    LeaveNotice,
    Triples,
)

MOST_EVENTS = 10_000_000
"""Events after which a simulation is taken to be without end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJobOutcome:
    """Figures of one job.

    Attributes:
        finish_seconds: since the beginning.
        waiting_seconds: without a lease, in all.
        longest_wait_seconds: without a lease, at a time.
        slowdown: time from arrival to finish, by the time alone on the device.
        pauses: times at which it was paused.
    """

    name: str
    arrival_seconds: float
    finish_seconds: float
    waiting_seconds: float
    longest_wait_seconds: float
    slowdown: float
    pauses: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedOutcome:
    """Figures of a job list under one policy.

    Attributes:
        makespan_seconds: until the last job has finished.
        steps_per_second: of all jobs, over the makespan.
        mean_waiting_seconds: without a lease, over the jobs.
        fairness: Jain's index of the jobs' slowdowns, from 1/n to 1 (equal).
        idle_share: bytes without a lease, over the makespan, as a share of the device.
        highest_bytes: the most that jobs held at once.
        shifted_share: bytes by which shifted steps would have lowered what jobs hold together, over the makespan, as a
            share of the device; of jobs with a shape.
        grants: leases granted.
    """

    policy: str
    makespan_seconds: float
    steps_per_second: float
    mean_waiting_seconds: float
    mean_slowdown: float
    fairness: float
    idle_share: float
    highest_bytes: int
    shifted_share: float
    grants: int
    jobs: tuple[SimulatedJobOutcome, ...]


@dataclasses.dataclass(slots=True)
class _Client:
    """A simulated job."""

    number: int
    spec: ListedJob
    lends: bool  # whether it gives bytes back while it evaluates
    sent: int = 0
    steps: int = 0
    point: FrontPoint | None = None  # None while the job is paused
    begin: float = 0.0  # job seconds at which `steps` was right
    evaluates_until: float | None = None  # job seconds
    pending: list[LeaseGrant] = dataclasses.field(default_factory=list)
    moving_until: float | None = None  # job seconds at which the state is out
    has_run: bool = False
    tells_step: bool = False  # the broker protects the job until it hears of a step
    steps_before: int = 0  # made before its present lease
    paused_since: float = 0.0
    waiting_seconds: float = 0.0
    longest_wait_seconds: float = 0.0
    pauses: int = 0
    evaluations: int = 0  # so far
    finish_seconds: float | None = None

    @property
    def points(self) -> Triples:
        """The front, as messages have it."""
        return tuple((each.nbytes, each.step_seconds, each.busy_seconds) for each in self.spec.front)

    def find_boundary(self, now: float) -> float:
        """Return the job seconds of the next step boundary, or now if the job can take up its latest lease at once."""
        if self.point is None:
            return now
        if self.evaluates_until is not None:
            assert self.spec.evaluation is not None
            can_change = self.lends and self.pending[-1].nbytes >= max(1, self.spec.evaluation.nbytes)
            return now if can_change else self.evaluates_until
        steps = max(0, math.ceil((now - self.begin) / self.point.step_seconds - 1e-9))
        return self.begin + steps * self.point.step_seconds

    def find_next(self, now: float) -> float:
        """Return the job seconds of the next event of this job."""
        if self.moving_until is not None:
            return self.moving_until
        if self.pending:
            return self.find_boundary(now)
        if self.point is None:
            return math.inf
        if self.evaluates_until is not None:
            return self.evaluates_until
        if self.tells_step:
            return self.begin + self.point.step_seconds
        return self.begin + (self.find_stop() - self.steps) * self.point.step_seconds

    def find_stop(self) -> int:
        """Return the number of steps after which the job evaluates, or ends."""
        every = self.spec.steps if self.spec.evaluation is None else self.spec.evaluation.steps
        return min(self.spec.steps, (self.evaluations + 1) * every)

    def count_steps(self, now: float) -> None:
        """Bring `steps` up to date, at a step boundary."""
        if self.point is not None and self.evaluates_until is None and now > self.begin:
            done = round((now - self.begin) / self.point.step_seconds)
            self.steps = min(self.spec.steps, self.steps + done)
            self.begin += done * self.point.step_seconds


_align_once = functools.lru_cache(maxsize=256)(align)


class _Simulation:
    """The clocks, the broker and the jobs."""

    def __init__(self, workload: JobList, policy: str, quantum_seconds: float, *, lends: bool) -> None:
        self.workload = workload
        self.broker = Broker(
            BrokerOptions(
                device_bytes=workload.device_bytes, policy=policy, quantum_seconds=quantum_seconds,
                heartbeat_seconds=math.inf,
            )
        )  # fmt: skip
        self.seconds = 0.0
        self.job_seconds = 0.0
        self.grants = 0
        self.highest_bytes = 0
        self.leased_byte_seconds = 0.0
        self.shifted_byte_seconds = 0.0
        self.clients = [_Client(place, spec, lends) for place, spec in enumerate(workload.jobs)]
        self.arriving = sorted(self.clients, key=lambda each: (each.spec.arrival_seconds, each.number), reverse=True)
        self.active: dict[int, _Client] = {}

    def run(self) -> None:
        """Run until all jobs have finished."""
        for _ in range(MOST_EVENTS):
            if not self.arriving and not self.active:
                return
            stretch = max(1.0, sum(
                min(1.0, each.point.busy_seconds / each.point.step_seconds)
                for each in self.active.values() if each.point is not None
            ))  # fmt: skip
            own = min((each.find_next(self.job_seconds) for each in self.active.values()), default=math.inf)
            own_seconds = self.seconds + (own - self.job_seconds) * stretch
            arrival = self.arriving[-1].spec.arrival_seconds if self.arriving else math.inf
            deadline = self.broker.next_deadline()
            moment = min(own_seconds, arrival, math.inf if deadline is None else deadline)
            if math.isinf(moment):
                raise InternalError(f"under {self.broker.options.policy}, {len(self.active)} jobs wait forever")
            self._pass_to(moment, own if moment == own_seconds else None, stretch)
            if moment == own_seconds:
                for client in [each for each in self.active.values() if each.find_next(own) <= own + 1e-12]:
                    self._advance(client)
            elif moment == arrival:
                self._arrive(self.arriving.pop())
            else:
                self._carry_out(self.broker.tick(self.seconds))
            if self.broker.free_bytes < 0:
                raise InternalError(f"jobs hold {-self.broker.free_bytes} bytes more than the device has")
        raise InternalError(f"the simulation has not ended after {MOST_EVENTS} events")

    def _pass_to(self, moment: float, own: float | None, stretch: float) -> None:
        passed = moment - self.seconds
        leased_bytes = self.workload.device_bytes - self.broker.free_bytes
        self.leased_byte_seconds += leased_bytes * passed
        self.shifted_byte_seconds += self._find_gain() * passed
        self.job_seconds = own if own is not None else self.job_seconds + passed / stretch
        self.seconds = moment

    def _find_gain(self) -> int:
        """Return the bytes that shifted steps would save among the jobs that run now."""
        curves = tuple(
            StepCurve(
                step_seconds=each.point.step_seconds,
                levels=tuple(math.ceil(share * each.point.nbytes) for share in each.spec.shape),
            )
            for each in self.active.values()
            if each.point is not None and each.spec.shape
        )
        return _align_once(curves).gain_bytes if len(curves) > 1 else 0

    def _arrive(self, client: _Client) -> None:
        spec = client.spec
        self.active[client.number] = client
        client.paused_since = self.seconds
        self._carry_out(self.broker.connect(client.number, client.number, self.seconds))
        self._send(client, JoinRequest(
            sequence=client.sent, name=spec.name, job="", floor_bytes=spec.front[0].nbytes,
            points=client.points,
            weight=spec.weight, priority=spec.priority, steps_left=spec.steps,
        ))  # fmt: skip

    def _advance(self, client: _Client) -> None:
        """Carry out what a job has to do at its step boundary."""
        if client.moving_until is not None:  # its state is out
            client.moving_until = None
            self._confirm(client, client.pending.pop(0))
            return
        if client.evaluates_until is not None:
            if self.job_seconds < client.evaluates_until - 1e-12:
                self._take_lease(client)
                return
            self._end_evaluation(client)
        client.count_steps(self.job_seconds)
        if client.steps >= client.spec.steps:
            del self.active[client.number]
            client.finish_seconds = self.seconds
            self._send(client, LeaveNotice(sequence=client.sent))
        elif client.pending:
            self._take_lease(client)
        if client.tells_step and client.steps > client.steps_before and client.number in self.active:
            client.tells_step = False
            seconds = 0.0 if client.point is None else client.point.step_seconds
            self._send(client, Heartbeat(sequence=client.sent, steps=client.steps, step_seconds=seconds))
        if client.number in self.active and client.point is not None and client.steps >= client.find_stop():
            self._begin_evaluation(client)

    def _begin_evaluation(self, client: _Client) -> None:
        evaluation, point = client.spec.evaluation, client.point
        assert evaluation is not None and point is not None
        client.evaluations += 1
        client.evaluates_until = self.job_seconds + evaluation.seconds
        if client.lends:
            nbytes = max(evaluation.nbytes, client.spec.front[0].nbytes)
            fastest = client.spec.front[-1]
            self._send_front(client, ((nbytes, fastest.step_seconds, fastest.busy_seconds),))

    def _end_evaluation(self, client: _Client) -> None:
        client.evaluates_until = None
        client.begin = self.job_seconds
        if client.lends:
            self._send_front(client, client.points)

    def _send_front(self, client: _Client, points: Triples) -> None:
        self._send(client, FrontUpdate(
            sequence=client.sent, floor_bytes=client.spec.front[0].nbytes, points=points, steps_left=client.spec.steps,
        ))  # fmt: skip

    def _take_lease(self, client: _Client) -> None:
        del client.pending[:-1]  # the last one counts
        grant = client.pending[0]
        move_seconds = client.spec.state_bytes / self.workload.link_bytes_per_second
        if not grant.nbytes:
            if client.point is not None:
                client.pauses += 1
                client.paused_since = self.seconds
            client.point = None
            client.moving_until = self.job_seconds + move_seconds
            return
        if client.point is None:
            waited = self.seconds - client.paused_since
            client.waiting_seconds += waited
            client.longest_wait_seconds = max(client.longest_wait_seconds, waited)
            client.begin = self.job_seconds + (move_seconds if client.has_run else 0.0)
            client.has_run = client.tells_step = True
            client.steps_before = client.steps
        client.point = find_point(client.spec.front, grant.nbytes)
        if client.point is None:
            raise InternalError(f"{client.spec.name} got {grant.nbytes} bytes, less than its floor")
        self._confirm(client, client.pending.pop(0))

    def _confirm(self, client: _Client, grant: LeaseGrant) -> None:
        self._send(client, LeaseConfirmed(sequence=client.sent, epoch=grant.epoch, held_bytes=grant.nbytes))

    def _send(
        self, client: _Client, message: JoinRequest | FrontUpdate | Heartbeat | LeaseConfirmed | LeaveNotice
    ) -> None:
        client.sent += 1
        self._carry_out(self.broker.receive(client.number, message, self.seconds))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, DropClient):
                raise UsageError(f"{self.clients[effect.client].spec.name}: {effect.reason}")
            if isinstance(effect, SendMessage) and isinstance(effect.message, LeaseGrant):
                self.grants += 1
                self.clients[effect.client].pending.append(effect.message)
        self.highest_bytes = max(self.highest_bytes, self.workload.device_bytes - self.broker.free_bytes)


def simulate_sharing(
    workload: JobList, policy: str = "marginal", *, quantum_seconds: float = 30.0, lends: bool = True
) -> SharedOutcome:
    """Run a job list under a policy, on a virtual clock.

    Args:
        lends: whether jobs that evaluate give back what they do not use.

    Raises:
        UnknownMember: there is no such policy.
        UsageError: a job needs more than the device.
    """
    simulation = _Simulation(workload, policy, quantum_seconds, lends=lends)
    simulation.run()
    outcomes = []
    for client in simulation.clients:
        finish = client.finish_seconds or 0.0
        outcomes.append(SimulatedJobOutcome(
            name=client.spec.name, arrival_seconds=client.spec.arrival_seconds, finish_seconds=finish,
            waiting_seconds=client.waiting_seconds, longest_wait_seconds=client.longest_wait_seconds,
            slowdown=(finish - client.spec.arrival_seconds) / client.spec.plain_seconds, pauses=client.pauses,
        ))  # fmt: skip
    slowdowns = [each.slowdown for each in outcomes] or [1.0]
    makespan = simulation.seconds
    count = len(slowdowns)
    return SharedOutcome(
        policy=policy,
        makespan_seconds=makespan,
        steps_per_second=sum(each.steps for each in workload.jobs) / makespan if makespan else 0.0,
        mean_waiting_seconds=sum(each.waiting_seconds for each in outcomes) / count,
        mean_slowdown=sum(slowdowns) / count,
        fairness=sum(slowdowns) ** 2 / (count * sum(each**2 for each in slowdowns)),
        idle_share=1 - simulation.leased_byte_seconds / (workload.device_bytes * makespan) if makespan else 1.0,
        highest_bytes=simulation.highest_bytes,
        shifted_share=simulation.shifted_byte_seconds / (workload.device_bytes * makespan) if makespan else 0.0,
        grants=simulation.grants,
        jobs=tuple(outcomes),
    )
