"""The broker's core: leases never exceed the device, and bad messages harm only their sender. No torch."""

from __future__ import annotations

import dataclasses
import json
import random
import time

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elbowroom._family import names
from elbowroom.errors import UsageError
from elbowroom.sharing import policies
from elbowroom.sharing.broker import Broker, BrokerOptions, DropClient, Effect, EndProcess, SendMessage
from elbowroom.sharing.lease_table import Remainder
from elbowroom.sharing.messages import (
    LONGEST_MESSAGE_BYTES,
    MOST_POINTS,
    PROTOCOL_VERSION,
    BadMessage,
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
    encode_message,
)

POLICIES = names(policies)
DEVICE_BYTES = 1000


@dataclasses.dataclass
class Client:
    """A job as it should behave."""

    number: int
    sent: int = 0
    limit_bytes: int = 0
    grants: list[LeaseGrant] = dataclasses.field(default_factory=list)
    steps: int = 0
    epoch: int = 0


@st.composite
def fronts(draw: st.DrawFn) -> tuple[tuple[int, float, float], ...]:
    sizes = draw(st.lists(st.integers(1, DEVICE_BYTES), min_size=0, max_size=6, unique=True))
    seconds = sorted(draw(st.lists(st.floats(0.1, 9), min_size=len(sizes), max_size=len(sizes))), reverse=True)
    return tuple((size, each, each * draw(st.floats(0, 1))) for size, each in zip(sorted(sizes), seconds, strict=True))


class BrokerMachine(RuleBasedStateMachine):
    """Jobs that come, go, die, fall silent, shrink late, and change."""

    @initialize(policy=st.sampled_from(POLICIES))
    def start(self, policy: str) -> None:
        self.broker = Broker(BrokerOptions(device_bytes=DEVICE_BYTES, policy=policy, quantum_seconds=5))
        self.clients: dict[int, Client] = {}
        self.pids: dict[int, int] = {}  # of clients that have joined again
        self.dead: dict[int, int] = {}  # bytes that a dead connection's process may hold
        self.now = 0.0
        self.count = 0

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, DropClient):  # well-behaved jobs are dropped only to let others run
                assert "no job can start" in effect.reason
                client = self.clients.pop(effect.client)
                self.dead[self.pids.pop(client.number, client.number)] = client.limit_bytes
                continue
            assert isinstance(effect, SendMessage)
            if isinstance(effect.message, LeaseGrant):
                client = self.clients[effect.client]
                assert effect.message.epoch == (client.grants[-1].epoch if client.grants else client.epoch) + 1
                client.grants.append(effect.message)
                client.limit_bytes = max(client.limit_bytes, effect.message.nbytes)

    @rule(points=fronts(), floor=st.integers(1, DEVICE_BYTES), weight=st.floats(0.1, 10), priority=st.integers(-3, 3))
    def join(self, points: tuple[tuple[int, float, float], ...], floor: int, weight: float, priority: int) -> None:
        client = Client(self.count)
        self.count += 1
        self.clients[client.number] = client
        self.carry_out(self.broker.connect(client.number, client.number, self.now))
        message = JoinRequest(
            sequence=0, name="job", job=str(client.number), floor_bytes=floor, points=points, weight=weight,
            priority=priority,
        )  # fmt: skip
        client.sent = 1
        self.carry_out(self.broker.receive_line(client.number, encode_message(message), self.now))

    def pick(self, data: st.DataObject) -> Client:
        return self.clients[data.draw(st.sampled_from(sorted(self.clients)))]

    def send(self, client: Client, message: object) -> None:
        numbered = dataclasses.replace(message, sequence=client.sent)  # type: ignore[type-var]
        client.sent += 1
        self.carry_out(self.broker.receive(client.number, numbered, self.now))  # type: ignore[arg-type]

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), sticks=st.booleans())
    def confirm(self, data: st.DataObject, sticks: bool) -> None:
        client = self.pick(data)
        if not client.grants:
            return
        place = data.draw(st.integers(0, len(client.grants) - 1))
        grant = client.grants[place]
        del client.grants[: place + 1]
        client.epoch = grant.epoch
        held_bytes = client.limit_bytes if sticks else grant.nbytes
        client.limit_bytes = max([held_bytes, grant.nbytes, *(each.nbytes for each in client.grants)])
        self.send(client, LeaseConfirmed(sequence=0, epoch=grant.epoch, held_bytes=held_bytes))

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), points=fronts(), floor=st.integers(1, DEVICE_BYTES))
    def change(self, data: st.DataObject, points: tuple[tuple[int, float, float], ...], floor: int) -> None:
        self.send(self.pick(data), FrontUpdate(sequence=0, floor_bytes=floor, points=points))

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        client = self.pick(data)
        client.steps += 1
        self.send(client, Heartbeat(sequence=0, steps=client.steps, step_seconds=1.0))

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), rests=st.booleans())
    def rest(self, data: st.DataObject, rests: bool) -> None:
        client = self.pick(data)
        self.send(client, RestNotice(sequence=0, rests=rests))
        if rests and client.number in self.clients:
            assert self.broker.jobs[client.number].lease_bytes == 0

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), says_so=st.booleans())
    def leave(self, data: st.DataObject, says_so: bool) -> None:
        client = self.pick(data)
        if says_so:
            self.send(client, LeaveNotice(sequence=0))
        else:
            self.dead[self.pids.pop(client.number, client.number)] = client.limit_bytes
        self.clients.pop(client.number, None)
        self.carry_out(self.broker.disconnect(client.number, self.now))

    @precondition(lambda self: self.dead)
    @rule(data=st.data(), is_same=st.booleans())
    def join_again(self, data: st.DataObject, is_same: bool) -> None:
        """A job joins again within its last lease, or another one of its process joins and leaves."""
        pid = data.draw(st.sampled_from(sorted(self.dead)))
        client = Client(self.count, sent=1)
        self.count += 1
        self.clients[client.number] = client
        if is_same:
            client.limit_bytes = self.dead.pop(pid)
            self.pids[client.number] = pid
        self.carry_out(self.broker.connect(client.number, pid, self.now))
        message = JoinRequest(
            sequence=0, name="job", job=str(pid) if is_same else "another", floor_bytes=1,
            lease_bytes=client.limit_bytes, held_bytes=client.limit_bytes,
        )  # fmt: skip
        self.carry_out(self.broker.receive(client.number, message, self.now))
        if not is_same:
            self.send(client, LeaveNotice(sequence=0))
            self.clients.pop(client.number, None)
            self.carry_out(self.broker.disconnect(client.number, self.now))

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def end_process(self, data: st.DataObject) -> None:
        pid = data.draw(st.sampled_from(sorted(self.dead)))
        del self.dead[pid]
        self.carry_out(self.broker.end_process(pid, self.now))

    @rule(seconds=st.sampled_from([-3.0, 0.0, 0.5, 5.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds  # also backwards: a clock that jumps
        self.carry_out(self.broker.tick(self.now))

    @rule(nbytes=st.integers(0, DEVICE_BYTES))
    def use_outside(self, nbytes: int) -> None:
        if nbytes <= self.broker.leases.outside_bytes + self.broker.free_bytes:  # it cannot take what jobs hold
            self.carry_out(self.broker.set_outside(nbytes, self.now))

    @invariant()
    def sum_is_within_the_device(self) -> None:
        if not hasattr(self, "clients"):
            return
        held_bytes = sum(each.limit_bytes for each in self.clients.values()) + sum(self.dead.values())
        assert held_bytes + self.broker.leases.outside_bytes <= DEVICE_BYTES
        assert self.broker.free_bytes == DEVICE_BYTES - held_bytes - self.broker.leases.outside_bytes


BrokerMachine.TestCase.settings = hypothesis.settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBroker = BrokerMachine.TestCase


MESSAGES = [
    JoinRequest(sequence=0, name="é", job="j", floor_bytes=3, points=((5, 0.5, 0.25),), steps_left=7, rests=True),
    FrontUpdate(sequence=1, floor_bytes=3, points=()),
    Heartbeat(sequence=2, steps=3, step_seconds=0.5, used_bytes=4),
    LeaseConfirmed(sequence=3, epoch=4, held_bytes=5),
    LeaveNotice(sequence=4),
    RestNotice(sequence=4, rests=True),
    StatusRequest(sequence=5),
    LeaseGrant(sequence=0, epoch=1, nbytes=2),
    WaitNotice(sequence=1, text="wait"),
    RefusalNotice(sequence=2, text="no"),
    Broker(BrokerOptions(device_bytes=5)).describe(3),
    StatusReply(
        sequence=0, policy="fair", device_bytes=9, outside_bytes=0, free_bytes=1,
        jobs=(JobStatus(name="a", pid=1, state="running", lease_bytes=1, held_bytes=1, floor_bytes=1, wanted_bytes=1,
                        steps=1, step_seconds=0.5, lost_share=0.0, waiting_seconds=0.0),),
    ),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES, ids=lambda each: type(each).__name__)
def test_messages_survive_the_wire_and_nothing_else_does(message: object) -> None:
    line = encode_message(message)  # type: ignore[arg-type]
    assert line.count(b"\n") == 1
    assert decode_message(line) == message
    fields = json.loads(line)
    for name in fields:
        with pytest.raises(BadMessage):
            decode_message(json.dumps({key: value for key, value in fields.items() if key != name}).encode())
        for wrong in (None, True, -1 << 70, 1 << 70, 1.5e308 * 10, "x" * 300, [], [[1]], {}, -0.5):
            if name in ("steps_left", "text", "state", "policy") and (wrong is None or isinstance(wrong, str)):
                continue
            if name == "rests" and wrong is True:  # a value like any other
                continue
            if name in ("points", "jobs") and wrong == []:
                continue
            with pytest.raises(BadMessage):
                decode_message(json.dumps({**fields, name: wrong}).encode())
    with pytest.raises(BadMessage):
        decode_message(json.dumps({**fields, "extra": 1}).encode())


@pytest.mark.parametrize(
    "line",
    [b"", b"{}", b"[]", b"\xff\xfe", b"[" * 5000, b"nul", b'{"type":"Heartbeat"}', b"9" * 5000],
)  # fmt: skip
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_message(line)


@hypothesis.given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_read(line: bytes) -> None:
    with pytest.raises(BadMessage):
        decode_message(line)


def join(broker: Broker, client: int, **fields: object) -> list[Effect]:
    broker.connect(client, 100 + client, 0.0)
    given = {"floor_bytes": 100, "job": "", **fields}
    message = JoinRequest(sequence=0, name=f"job{client}", **given)  # type: ignore[arg-type]
    return broker.receive(client, message, 0.0)


OWN_VERSION = b'"version":%d' % PROTOCOL_VERSION

BAD_LINES = {
    "oversized": b"x" * (LONGEST_MESSAGE_BYTES + 1),
    "no JSON": b"{\n",
    "replayed": encode_message(JoinRequest(sequence=0, name="job0", job="", floor_bytes=100)),
    "out of order": encode_message(Heartbeat(sequence=7, steps=1)),
    "another version": encode_message(Heartbeat(sequence=1, steps=1)).replace(OWN_VERSION, b'"version":1'),
    "a second job": encode_message(JoinRequest(sequence=1, name="job0", job="", floor_bytes=100)),
    "a lease that never was": encode_message(LeaseConfirmed(sequence=1, epoch=9, held_bytes=0)),
    "a message of the broker": encode_message(LeaseGrant(sequence=1, epoch=9, nbytes=900)),
    "too many points": encode_message(
        FrontUpdate(sequence=1, floor_bytes=1, points=tuple((n + 1, 1.0, 1.0) for n in range(MOST_POINTS + 1)))
    ),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_message_drops_its_sender_alone(kind: str) -> None:
    broker = Broker(BrokerOptions(device_bytes=1000))
    join(broker, 0)
    join(broker, 1)
    held_bytes = broker.jobs[0].held_bytes
    effects = broker.receive_line(0, BAD_LINES[kind], 1.0)
    refusal = next(each.message for each in effects if isinstance(each, SendMessage) and each.client == 0)
    assert isinstance(refusal, RefusalNotice)
    assert [each.client for each in effects if isinstance(each, DropClient)] == [0]
    assert list(broker.jobs) == [1]
    assert sum(each.nbytes for each in broker.remainders) == held_bytes  # its process lives
    assert broker.receive_line(0, b"more", 1.0) == []
    broker.end_process(100, 2.0)
    assert broker.remainders == []


def test_a_job_larger_than_the_device_is_refused() -> None:
    broker = Broker(BrokerOptions(device_bytes=1000))
    effects = join(broker, 0, floor_bytes=1001)
    assert any(isinstance(each, DropClient) for each in effects)
    with pytest.raises(UsageError, match="bytes to lease"):
        Broker(BrokerOptions(device_bytes=0))


def test_a_silent_job_keeps_its_bytes_until_its_process_is_ended() -> None:
    broker = Broker(BrokerOptions(device_bytes=1000, heartbeat_seconds=10, end_seconds=60))
    join(broker, 0, floor_bytes=600)
    assert broker.jobs[0].lease_bytes >= 600
    join(broker, 1, floor_bytes=600)
    for second in range(1, 12):
        assert not broker.jobs[0].is_silent
        broker.tick(second)
    assert broker.jobs[0].is_silent
    assert broker.jobs[1].lease_bytes == 0
    ended = [each for second in range(12, 62) for each in broker.tick(second)]
    assert EndProcess(100) in ended
    broker.end_process(100, 61.5)
    broker.receive(1, Heartbeat(sequence=1, steps=0), 61.6)
    assert broker.jobs[1].lease_bytes >= 600


def test_a_job_that_uses_more_than_its_lease_counts_with_what_it_uses() -> None:
    broker = Broker(BrokerOptions(device_bytes=1000))
    join(broker, 0, points=((100, 2.0, 2.0), (300, 1.0, 1.0)))
    broker.receive(0, Heartbeat(sequence=1, steps=1, used_bytes=800), 1.0)
    assert broker.free_bytes == 200
    join(broker, 1, points=((100, 2.0, 2.0), (700, 1.0, 1.0)))
    assert broker.jobs[1].held_bytes <= 200


def test_a_restarted_broker_knows_what_was_leased() -> None:
    broker = Broker(BrokerOptions(device_bytes=1000))
    broker.restore(Remainder(100, "", "job0", 700))
    join(broker, 1, floor_bytes=400)
    assert broker.jobs[1].lease_bytes == 0
    join(broker, 0, floor_bytes=400, held_bytes=300, lease_bytes=700, points=((400, 1.0, 1.0),))
    assert broker.remainders == []
    assert broker.jobs[0].held_bytes == 700  # until it confirms that it needs less
    broker.receive(0, LeaseConfirmed(sequence=1, epoch=broker.jobs[0].epoch, held_bytes=400), 0.0)
    assert broker.jobs[1].lease_bytes >= 400


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_for_100_jobs_is_quick(policy: str) -> None:
    draw = random.Random(3)
    broker = Broker(BrokerOptions(device_bytes=10**12, policy=policy))
    seconds = []
    for client in range(100):
        floor = draw.randint(10**9, 10**10)
        points = tuple((floor + place * draw.randint(10**8, 10**9), 3 - place / 12, 1.0) for place in range(24))
        begin = time.process_time()
        join(broker, client, floor_bytes=floor, points=points)
        seconds.append(time.process_time() - begin)
        broker.jobs[client].confirm(broker.jobs[client].epoch, broker.jobs[client].lease_bytes)
    assert sorted(seconds)[90] < 0.05


@pytest.mark.parametrize("policy", ["marginal", "queue"])
def test_who_waits_is_told_why(policy: str) -> None:
    """A job that was paused is told of the one that has its bytes; under `queue` none is paused, and none is due."""
    broker = Broker(BrokerOptions(device_bytes=DEVICE_BYTES, policy=policy, quantum_seconds=5))
    sent: dict[int, list[object]] = {1: [], 2: []}
    numbers = {1: 0, 2: 0}

    def send(client: int, message: object, now: float) -> None:
        numbered = dataclasses.replace(message, sequence=numbers[client])  # type: ignore[type-var]
        numbers[client] += 1
        keep(broker.receive(client, numbered, now))  # type: ignore[arg-type]

    def keep(effects: list[Effect]) -> None:
        for effect in effects:
            assert isinstance(effect, SendMessage)
            sent[effect.client].append(effect.message)

    for client, name in ((1, "first"), (2, "second")):
        keep(broker.connect(client, client, 0.0))
        send(client, JoinRequest(sequence=0, name=name, job=name, floor_bytes=700), 0.0)
        if client == 1:
            (grant,) = sent[1]
            assert isinstance(grant, LeaseGrant)
            send(1, LeaseConfirmed(sequence=0, epoch=grant.epoch, held_bytes=700), 0.0)
            send(1, Heartbeat(sequence=0, steps=1, step_seconds=1.0, used_bytes=700), 0.0)
    (notice,) = sent[2]
    assert isinstance(notice, WaitNotice) and "held by: first (pid 1)" in notice.text
    assert ("due to run after 5.00 s" in notice.text) == (policy != "queue")
    keep(broker.tick(6.0))
    if policy == "queue":
        return
    assert isinstance(sent[1][-1], LeaseGrant) and not sent[1][-1].nbytes  # told nothing while it lets go
    send(1, LeaseConfirmed(sequence=0, epoch=sent[1][-1].epoch, held_bytes=0), 6.0)
    told = [each for each in sent[1] if isinstance(each, WaitNotice)]
    assert len(told) == 1 and "held by: second (pid 2)" in told[0].text
