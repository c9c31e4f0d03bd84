"""Attacks on the broker and its clients: lost messages, stopped brokers, deleted files, jumping clocks. No torch."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time

import hypothesis
import psutil
import pytest
from hypothesis import strategies as st

from elbowroom._family import names
from elbowroom.errors import BrokerLost, UsageError
from elbowroom.sharing import policies
from elbowroom.sharing.broker import Broker, BrokerOptions, DropClient, Effect, EndProcess, SendMessage
from elbowroom.sharing.messages import (
    MOST_BYTES,
    STEP_SECONDS,
    WEIGHTS,
    BadMessage,
    FromJob,
    FrontUpdate,
    Heartbeat,
    JoinRequest,
    LeaseConfirmed,
    LeaseGrant,
    RefusalNotice,
    RestNotice,
    StatusRequest,
    decode_message,
    encode_message,
)
from elbowroom.sharing.transport import client as client_module
from elbowroom.sharing.transport import processes
from elbowroom.sharing.transport.client import BrokerClient, ask_status
from tests.pure.test_sharing_broker import join
from tests.pure.test_sharing_transport import BROKER, MIB, Stage, stage, wait_until

__all__ = ["stage"]

BYTES = st.one_of(st.integers(0, 2000), st.just(MOST_BYTES))
SECONDS = st.one_of(st.floats(0, 100), st.just(float(MOST_BYTES)))
POINTS = st.lists(st.tuples(BYTES, st.sampled_from([*STEP_SECONDS, 1.0, 2.0]), SECONDS), max_size=4).map(tuple)
STEPS = st.one_of(st.none(), BYTES)
MESSAGES: st.SearchStrategy[FromJob] = st.one_of(
    st.builds(
        JoinRequest, sequence=st.just(0), name=st.just("job"), job=st.sampled_from("ab"), floor_bytes=BYTES,
        points=POINTS, weight=st.sampled_from([*WEIGHTS, 1.0]), priority=st.sampled_from([0, -MOST_BYTES]),
        held_bytes=BYTES, lease_bytes=BYTES, steps_left=STEPS,
    ),
    st.builds(FrontUpdate, sequence=st.just(0), floor_bytes=BYTES, points=POINTS, steps_left=STEPS),
    st.builds(Heartbeat, sequence=st.just(0), steps=BYTES, step_seconds=SECONDS, used_bytes=BYTES),
    st.builds(LeaseConfirmed, sequence=st.just(0), epoch=st.integers(0, 3), held_bytes=BYTES),
    st.builds(RestNotice, sequence=st.just(0), rests=st.booleans()),
    st.builds(StatusRequest, sequence=st.just(0)),
)  # fmt: skip


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(
    st.sampled_from(names(policies)),
    st.lists(st.tuples(st.integers(0, 4), MESSAGES, st.sampled_from([0.0, 1.0, 40.0, -7.0])), max_size=30),
)
def test_no_message_takes_the_broker_down(policy: str, sent: list[tuple[int, FromJob, float]]) -> None:
    """Jobs lie about all of their figures; the broker goes on, and can tell everybody its state."""
    broker = Broker(BrokerOptions(device_bytes=1000, policy=policy, quantum_seconds=5, end_seconds=20))
    now = 0.0
    numbers = [0] * 5
    for client in range(5):
        broker.connect(client, 100 + client % 2, now)
    for client, message, seconds in sent:
        now += seconds
        line = encode_message(message).replace(b'"sequence":0', b'"sequence":%d' % numbers[client])
        effects = broker.receive_line(client, line, now) + broker.tick(now)
        numbers[client] += 1
        for effect in effects:
            if isinstance(effect, SendMessage):
                encode_message(effect.message)
            if isinstance(effect, DropClient):
                numbers[effect.client] = 0
                broker.connect(effect.client, 100 + effect.client % 2, now)
        encode_message(broker.describe())


def find_refusal(effects: list[Effect], client: int) -> str:
    found = [each.message for each in effects if isinstance(each, SendMessage) and each.client == client]
    assert isinstance(found[-1], RefusalNotice)
    return found[-1].text


def test_another_job_of_a_process_does_not_free_what_the_first_one_holds() -> None:
    broker = Broker(BrokerOptions(device_bytes=1000))
    join(broker, 0, job="first", points=((100, 2.0, 2.0), (700, 1.0, 1.0)))
    broker.disconnect(0, 1.0)
    broker.connect(1, 100, 1.0)  # the same process
    broker.receive(1, JoinRequest(sequence=0, name="job0", job="second", floor_bytes=100), 1.0)
    assert [each.nbytes for each in broker.remainders] == [700]
    assert broker.jobs[1].held_bytes <= 300


def test_a_job_that_joins_again_counts_once() -> None:
    broker = Broker(BrokerOptions(device_bytes=1000))
    join(broker, 0, points=((100, 2.0, 2.0), (700, 1.0, 1.0)))
    broker.connect(1, 100, 1.0)  # before the end of its former connection is known
    again = JoinRequest(sequence=0, name="job0", job="", floor_bytes=100, held_bytes=700, lease_bytes=700)
    assert DropClient(0, "its job has joined again") in broker.receive(1, again, 1.0)
    assert list(broker.jobs) == [1]
    assert broker.remainders == []
    broker.disconnect(0, 2.0)
    assert broker.remainders == []


def test_a_broker_that_was_stopped_does_not_take_its_jobs_for_silent() -> None:
    broker = Broker(BrokerOptions(device_bytes=1000, heartbeat_seconds=10, end_seconds=20))
    join(broker, 0)
    assert broker.tick(1e6) == []
    assert not broker.jobs[0].is_silent
    ended = [each for second in range(1, 40) for each in broker.tick(1e6 + second)]
    assert EndProcess(100) in ended


def test_a_clock_that_goes_back_stops_no_turns() -> None:
    broker = Broker(BrokerOptions(device_bytes=1000, quantum_seconds=30))
    join(broker, 0, floor_bytes=600)
    broker.receive(0, Heartbeat(sequence=1, steps=1), 5000.0)
    join(broker, 1, floor_bytes=600)  # at 0 s
    assert [each.lease_bytes > 0 for each in broker.jobs.values()] == [True, False]
    for second in range(5, 35, 5):
        broker.receive(0, Heartbeat(sequence=1 + second // 5, steps=second), float(second))
        broker.receive(1, Heartbeat(sequence=second // 5, steps=0), float(second))
    assert broker.jobs[0].lease_bytes == 0


def test_a_job_that_can_never_run_is_refused() -> None:
    broker = Broker(BrokerOptions(device_bytes=1000))
    join(broker, 0)
    assert "needs at least 1.2 KiB" in find_refusal(join(broker, 1, held_bytes=1200), 1)
    broker.end_process(101, 1.0)
    join(broker, 2)
    grown = broker.receive(2, FrontUpdate(sequence=1, floor_bytes=1001, points=()), 1.0)
    assert "needs at least" in find_refusal(grown, 2)
    assert broker.jobs[0].lease_bytes >= 100


def test_jobs_that_keep_each_other_from_starting_do_not_wait_for_good() -> None:
    broker = Broker(BrokerOptions(device_bytes=1000))
    broker.set_outside(1000, 0.0)
    for client in range(3):
        join(broker, client, floor_bytes=600, held_bytes=300)
    assert len(broker.jobs) == 2  # 900 bytes are held, so that no job could take 300 more
    broker.set_outside(0, 1.0)
    effects = broker.end_process(102, 2.0)
    assert [each.client for each in effects if isinstance(each, SendMessage)] == [0]
    assert broker.jobs[0].lease_bytes >= 600


def test_a_late_confirmation_is_no_residue() -> None:
    broker = Broker(BrokerOptions(device_bytes=1000, quantum_seconds=5))
    join(broker, 0, floor_bytes=600)
    join(broker, 1, floor_bytes=300)
    broker.receive(0, LeaseConfirmed(sequence=1, epoch=broker.jobs[0].epoch, held_bytes=600), 0.0)
    broker.receive(0, Heartbeat(sequence=2, steps=1), 1.0)
    broker.receive(1, Heartbeat(sequence=1, steps=1), 1.0)
    before = broker.jobs[0].epoch
    join(broker, 2, floor_bytes=900)
    broker.tick(8.0)
    assert [each.lease_bytes for each in broker.jobs.values()] == [0, 0, 0]
    effects = broker.receive(0, LeaseConfirmed(sequence=3, epoch=before, held_bytes=600), 8.0)
    assert not effects  # it still moves its state out
    assert broker.jobs[0].residue_bytes == 0


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "\ud800"])
def test_names_are_printable(name: str) -> None:
    with pytest.raises(BadMessage, match="name cannot be"):
        decode_message(encode_message(JoinRequest(sequence=0, name=name, job="", floor_bytes=1)))


def test_the_time_of_day_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    before = processes.find_start(os.getpid())
    booted = psutil.boot_time()
    monkeypatch.setattr(psutil._pslinux, "boot_time", lambda: booted + 3600)
    monkeypatch.setattr(psutil._pslinux, "BOOT_TIME", booted + 3600, raising=False)
    assert processes.find_start(os.getpid()) == before is not None
    assert processes.find_start(2**22 + 1) is None


def test_a_deleted_lock_lets_no_second_broker_in(stage: Stage) -> None:
    stage.start_broker()
    inode = stage.address.lock.stat().st_ino
    stage.address.lock.unlink()
    stage.address.socket.unlink()
    wait_until(stage.address.socket.exists)
    assert stage.address.lock.stat().st_ino != inode
    second = stage.run(BROKER, 1)
    assert second.wait(10) != 0
    wait_until(lambda: stage.try_status() is not None)


def test_a_file_that_cannot_be_written_does_not_end_the_broker(stage: Stage) -> None:
    stage.start_broker()
    wait_until(lambda: not stage.address.leases.is_dir())
    stage.address.leases.unlink(missing_ok=True)
    stage.address.leases.mkdir()
    stage.start_job("job", 60)
    wait_until(lambda: stage.held("job") >= 60)


@pytest.fixture
def short_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "LONGEST_SEND_SECONDS", 0.2)


def listen(stage: Stage, backlog: int) -> socket.socket:
    """Listen as a broker that has been stopped."""
    stage.address.prepare()
    listener = socket.socket(socket.AF_UNIX)
    mask = os.umask(0o177)
    listener.bind(str(stage.address.socket))
    os.umask(mask)
    listener.listen(backlog)
    return listener


@pytest.mark.usefixtures("short_sends")
def test_a_stopped_broker_does_not_block_a_job_that_starts(stage: Stage) -> None:
    with listen(stage, 0), stage.connect(), pytest.raises(UsageError, match="does not answer"):
        BrokerClient(stage.address, name="job", floor_bytes=1, held_bytes=0)


def test_the_socket_of_a_killed_broker_is_no_broker(stage: Stage) -> None:
    listen(stage, 0).close()
    with pytest.raises(UsageError, match=r"no broker serves .*elbowroom share"):
        BrokerClient(stage.address, name="job", floor_bytes=1, held_bytes=0)
    with pytest.raises(UsageError, match=r"no broker serves .*elbowroom share"):
        ask_status(stage.address)


@pytest.mark.usefixtures("short_sends")
def test_messages_that_a_stopped_broker_does_not_take_are_made_up_for(stage: Stage) -> None:
    listener = listen(stage, 5)
    client = BrokerClient(stage.address, name="job", floor_bytes=MIB, held_bytes=0)
    try:
        points = tuple((MIB + place, 2.0 - place / 100, 1.0) for place in range(60))
        begin = time.monotonic()
        for _ in range(200):
            client.report(2 * MIB, points)
        assert time.monotonic() - begin < 10  # it does not wait for each of them
        listener.close()
        stage.start_broker()
        wait_until(lambda: stage.held("job") >= 2)
        client.report(3 * MIB, ())
        wait_until(lambda: stage.held("job") >= 3)
        assert not client.refusal
    finally:
        client.close()


def test_a_lease_that_is_taken_back_at_once_is_confirmed(stage: Stage) -> None:
    with listen(stage, 5) as listener:
        client = BrokerClient(stage.address, name="job", floor_bytes=1, held_bytes=7)
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            decode_message(lines.readline())
            for number, nbytes in enumerate((60, 0)):
                connection.sendall(encode_message(LeaseGrant(sequence=number, epoch=number + 1, nbytes=nbytes)))
            wait_until(lambda: client.grant is not None and not client.grant.nbytes)
            thread = threading.Thread(target=lambda: client.wait(None, print))
            thread.start()
            answers = (decode_message(line) for line in lines)
            confirmed = next(each for each in answers if isinstance(each, LeaseConfirmed))
            assert (confirmed.epoch, confirmed.held_bytes) == (2, 7)
            connection.sendall(encode_message(LeaseGrant(sequence=2, epoch=3, nbytes=50)))
            thread.join(5)
            assert not thread.is_alive()
    client.close()


def test_a_job_that_rests_lets_others_run(stage: Stage) -> None:
    stage.start_broker()
    client = BrokerClient(stage.address, name="rests", floor_bytes=60 * MIB, held_bytes=0)
    try:
        grant = client.wait(None, print)
        assert client.take(grant)
        client.confirm(grant, grant.nbytes)
        client.rest(True)
        pause = client.wait_for(lambda grant: not grant.nbytes, 5)
        assert pause is not None
        assert client.take(pause)
        client.confirm(pause, 10 * MIB)
        other = stage.start_job("other", 60)
        wait_until(lambda: stage.held("other") >= 60)
        time.sleep(1.2)  # more than a quantum: it is not due
        assert (stage.held("rests"), stage.held("other")) == (10, 90)
        client.rest(False)
        assert client.wait(pause, print).nbytes >= 60 * MIB
        other.kill()
    finally:
        client.close()


def test_a_waiting_job_is_told_that_its_broker_is_gone(stage: Stage) -> None:
    broker = stage.start_broker()
    stage.start_job("first", 60)
    wait_until(lambda: stage.held("first") >= 60)
    broker.send_signal(signal.SIGSTOP)
    client = BrokerClient(stage.address, name="second", floor_bytes=90 * MIB, held_bytes=0)
    told: list[str] = []
    thread = threading.Thread(target=lambda: client.wait(None, told.append))
    thread.start()
    try:
        broker.kill()
        wait_until(lambda: any("the broker of cpu is gone" in each for each in told))
        with pytest.raises(BrokerLost, match="without_broker is 'stop'"):
            client.wait(None, told.append, needs_broker=True)
    finally:
        stage.processes[1].kill()
        stage.start_broker()
        thread.join(10)
        client.close()
    assert not thread.is_alive()


def test_a_pause_that_the_next_broker_has_not_heard_of_is_told_again(stage: Stage) -> None:
    broker = stage.start_broker()
    client = BrokerClient(stage.address, name="job", floor_bytes=60 * MIB, held_bytes=0)
    try:
        grant = client.wait(None, print)
        assert client.take(grant)
        client.confirm(grant, grant.nbytes)
        other = stage.start_job("other", 60)
        wait_until(lambda: (client.note_step(0.1, 0), client.grant is not grant)[1])  # a pause
        pause = client.grant
        assert pause is not None
        assert client.take(pause)
        broker.kill()  # while the state moves out
        broker.wait()
        other.kill()
        stage.start_broker()
        wait_until(lambda: client.is_connected and stage.held("job") >= 60)
        client.confirm(pause, 0)
        assert client.wait(pause, print).nbytes
    finally:
        client.close()


def test_a_job_that_the_broker_cannot_watch_is_told_so(stage: Stage) -> None:
    blind = "import elbowroom.sharing.transport.server as server\nserver.find_start = lambda pid: None\n"
    stage.run(blind + BROKER, 1e9)
    wait_until(stage.address.socket.exists)
    client = BrokerClient(stage.address, name="job", floor_bytes=1, held_bytes=0)
    try:
        with pytest.raises(UsageError, match="runs in another container, or has ended, so the broker cannot watch it"):
            client.wait(None, print)
    finally:
        client.close()
