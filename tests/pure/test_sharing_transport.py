"""The broker and its clients as real processes on a real socket. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from elbowroom.errors import UsageError
from elbowroom.sharing.job_record import JobRecord
from elbowroom.sharing.lease_table import Remainder
from elbowroom.sharing.messages import (
    LONGEST_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Heartbeat,
    JoinRequest,
    LeaveNotice,
    RefusalNotice,
    StatusReply,
    decode_message,
    encode_message,
)
from elbowroom.sharing.transport.address import BrokerAddress, find_address
from elbowroom.sharing.transport.client import BrokerClient, _hang_up_at_exit, ask_status
from elbowroom.sharing.transport.processes import read_apps
from elbowroom.sharing.transport.server import TICK_SECONDS
from elbowroom.sharing.waiting import explain_wait

MIB = 1 << 20

BROKER = """
import asyncio, sys
from elbowroom.sharing.broker import Broker, BrokerOptions
from elbowroom.sharing.transport.address import find_address
from elbowroom.sharing.transport.server import BrokerServer, serve_until_interrupted
end = float(sys.argv[2])
options = BrokerOptions(device_bytes=100 << 20, quantum_seconds=0.5, heartbeat_seconds=1.5, end_seconds=end)
async def main():
    await serve_until_interrupted(BrokerServer(Broker(options), find_address("cpu", sys.argv[1])))
asyncio.run(main())
"""

JOB = """
import sys, time
from elbowroom.sharing.transport.address import find_address
from elbowroom.sharing.transport.client import BrokerClient
address, floor_bytes = find_address("cpu", sys.argv[1]), int(sys.argv[3]) << 20
client = BrokerClient(address, name=sys.argv[2], floor_bytes=floor_bytes, held_bytes=0)
applied = None
while True:
    grant = client.grant
    if grant is not None and grant is not applied and client.take(grant):
        applied = grant
        client.confirm(grant, grant.nbytes)
    if applied is not None and applied.nbytes:
        client.note_step(0.01, 0)
    time.sleep(0.01)
"""


class Stage:
    """A folder for one broker, and the processes started in it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.address = BrokerAddress("cpu", folder)
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self, code: str, *arguments: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", code, str(self.address.folder), *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, env=environment))
        return self.processes[-1]

    def start_broker(self, end_seconds: float = 1e9) -> subprocess.Popen[bytes]:
        broker = self.run(BROKER, end_seconds)
        wait_until(lambda: self.try_status() is not None)
        return broker

    def start_job(self, name: str, floor_mib: int) -> subprocess.Popen[bytes]:
        return self.run(JOB, name, floor_mib)

    def try_status(self) -> StatusReply | None:
        with contextlib.suppress(UsageError):
            return ask_status(self.address)
        return None

    def held(self, name: str) -> int:
        """Bytes that count as taken by a job, in MiB; -1 if the broker does not know it."""
        reply = self.try_status()
        rows = [] if reply is None else [each for each in reply.jobs if each.name == name]
        if reply is not None:
            assert sum(each.held_bytes for each in reply.jobs) <= reply.device_bytes
        return rows[0].held_bytes // MIB if rows else -1

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(5)
        connection.connect(str(self.address.socket))
        return connection


@pytest.fixture
def stage() -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="er-") as folder:  # short, for the socket
        made = Stage(pathlib.Path(folder) / "share")
        try:
            yield made
        finally:
            made.end()


def wait_until(is_so: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never was so"
        time.sleep(0.02)


def test_a_killed_job_gives_its_bytes_back(stage: Stage) -> None:
    stage.start_broker()
    first = stage.start_job("first", 60)
    wait_until(lambda: stage.held("first") >= 60)
    stage.start_job("second", 90)
    wait_until(lambda: stage.held("second") >= 0)
    first.kill()
    first.wait()
    wait_until(lambda: stage.held("second") >= 90)
    assert stage.held("first") == -1


def test_two_jobs_that_do_not_fit_together_take_turns(stage: Stage) -> None:
    stage.start_broker()
    for name in ("first", "second"):
        stage.start_job(name, 60)
    for name in ("first", "second", "first", "second"):
        wait_until(lambda name=name: stage.held(name) >= 60)  # type: ignore[misc]


def test_a_silent_job_keeps_its_bytes_until_it_is_ended(stage: Stage) -> None:
    stage.start_broker(end_seconds=4.0)
    first = stage.start_job("first", 60)
    wait_until(lambda: stage.held("first") >= 60)
    first.send_signal(signal.SIGSTOP)
    stage.start_job("second", 60)
    wait_until(lambda: (reply := stage.try_status()) is not None and "silent" in [each.state for each in reply.jobs])
    assert stage.held("second") <= 0
    wait_until(lambda: stage.held("second") >= 60)
    assert first.wait(5) == -signal.SIGKILL


def test_jobs_outlive_their_broker_and_join_the_next(stage: Stage) -> None:
    broker = stage.start_broker()
    stage.start_job("first", 60)
    wait_until(lambda: stage.held("first") == 100)
    broker.kill()
    broker.wait()
    assert json.loads(stage.address.leases.read_text())[0]["bytes"] == 100 * MIB
    stage.start_job("second", 30).wait(10)  # there is no broker
    stage.start_broker()
    assert stage.held("first") >= 60  # restored at once, before the job has joined again
    stage.start_job("third", 30)
    wait_until(lambda: stage.held("third") >= 30)
    reply = ask_status(stage.address)
    assert all(each.state != "disconnected" for each in reply.jobs)


def join(stage: Stage) -> BrokerClient:
    """Join the broker from this process, which lives on when the job has left."""
    client = BrokerClient(stage.address, name="first", floor_bytes=60 * MIB, held_bytes=0)
    grant = client.wait(None, print)
    assert client.take(grant)
    client.confirm(grant, grant.nbytes)
    wait_until(lambda: stage.held("first") == 100)
    return client


@pytest.mark.parametrize("is_broker_back", [False, True])
def test_a_job_that_leaves_without_a_broker_holds_nothing_of_the_next(stage: Stage, is_broker_back: bool) -> None:
    broker = stage.start_broker()
    client = join(stage)
    broker.kill()
    broker.wait()
    if is_broker_back:
        stage.start_broker()
    client.close()
    assert len(stage.address.list_departures()) == (not is_broker_back)
    if not is_broker_back:
        stage.start_broker()
    wait_until(lambda: stage.held("first") == -1, 2)
    assert not stage.address.list_departures()
    assert not json.loads(stage.address.leases.read_text())


def test_an_interrupted_broker_prints_nothing(stage: Stage) -> None:
    broker = stage.start_broker()
    client = join(stage)
    broker.send_signal(signal.SIGINT)
    assert broker.wait(10) == 0
    client.close()
    assert broker.stderr is not None
    assert not broker.stderr.read()


def test_a_lease_of_a_job_that_joins_late_outlives_the_broker(stage: Stage) -> None:
    broker = stage.start_broker()
    with stage.connect() as connection:
        time.sleep(3 * TICK_SECONDS)  # the broker looks at its processes before the job has joined
        connection.sendall(encode_message(JoinRequest(sequence=0, name="late", job="", floor_bytes=1, held_bytes=MIB)))
        wait_until(lambda: stage.held("late") >= 1)
        broker.kill()
        broker.wait()
        stage.start_broker()
        assert stage.held("late") >= 1


def test_one_broker_a_device(stage: Stage) -> None:
    broker = stage.start_broker()
    second = stage.run(BROKER, 1)
    assert second.wait(10) != 0
    assert second.stderr is not None
    assert f"process {broker.pid} already is the broker of cpu".encode() in second.stderr.read()
    assert stage.try_status() is not None  # the first one still serves
    broker.terminate()
    assert broker.wait(10) == 0
    assert not stage.address.socket.exists()


@pytest.mark.parametrize("what", ["folder", "socket"])
def test_others_must_not_open_the_socket(stage: Stage, what: str) -> None:
    stage.start_broker()
    path = stage.address.folder if what == "folder" else stage.address.socket
    assert path.stat().st_mode & 0o077 == 0
    path.chmod(0o755)
    with pytest.raises(UsageError, match=r"others can open .*chmod go="):
        BrokerClient(stage.address, name="job", floor_bytes=1, held_bytes=0)
    path.chmod(0o700)
    assert stage.try_status() is not None


def test_no_broker_and_odd_addresses(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="elbowroom share --device cpu"):
        ask_status(stage.address)
    with pytest.raises(UsageError, match="no device"):
        find_address("../cpu")
    with pytest.raises(UsageError, match="shorter path"):
        BrokerAddress("cpu", stage.address.folder.parent / ("x" * 120)).prepare()
    stage.address.prepare()
    stage.address.socket.write_text("not a socket")
    with pytest.raises(UsageError, match="not a socket"):
        ask_status(stage.address)
    if os.geteuid() == 0:
        stage.address.socket.unlink()
        os.chown(stage.address.folder, 12345, -1)
        with pytest.raises(UsageError, match="belongs to user 12345"):
            stage.address.prepare()


def test_a_bad_client_harms_itself_alone(stage: Stage) -> None:
    stage.start_broker()
    stage.start_job("good", 60)
    wait_until(lambda: stage.held("good") >= 60)
    join = encode_message(JoinRequest(sequence=0, name="bad", job="", floor_bytes=1))
    for lines in (
        b"x" * (LONGEST_MESSAGE_BYTES + 10) + b"\n",
        b"\x00\xff\n",
        join + join,
        join + encode_message(Heartbeat(sequence=5, steps=1)),
        join.replace(b'"version":%d' % PROTOCOL_VERSION, b'"version":99'),
    ):
        with stage.connect() as connection, connection.makefile("rb") as reader:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(lines)
            answers = [decode_message(line) for line in reader if line.endswith(b"\n")]
            assert isinstance(answers[-1], RefusalNotice)
    with stage.connect() as connection:
        connection.sendall(join[:20])  # half a line, and gone
    assert stage.held("good") >= 60


def test_fifty_connections(stage: Stage) -> None:
    stage.start_broker()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(stage.connect()) for _ in range(50)]
        for number, connection in enumerate(connections):
            connection.sendall(encode_message(JoinRequest(sequence=0, name="job", job=str(number), floor_bytes=MIB)))
        wait_until(lambda: (reply := stage.try_status()) is not None and len(reply.jobs) == 50)


def test_a_refused_job_is_told_why(stage: Stage) -> None:
    stage.start_broker()
    client = BrokerClient(stage.address, name="giant", floor_bytes=101 * MIB, held_bytes=0)
    try:
        with pytest.raises(UsageError, match=r"giant needs at least 101.0 MiB, and the broker has 100.0 MiB in all"):
            client.wait(None, lambda text: None)
    finally:
        client.close()


def test_the_drivers_list_of_processes() -> None:
    assert read_apps("12, 300\n13, [N/A]\n\nnonsense\n14, 5\n") == [(12, 300 * MIB), (14, 5 * MIB)]


def test_a_waiting_job_is_told_of_disconnected_jobs_by_name() -> None:
    job = mock.Mock(spec=JobRecord, floor_bytes=MIB, held_bytes=0)
    job.name = "second"
    text = explain_wait(job, [job], [Remainder(7, "a", "first", 2 * MIB)], 0, 30.0)
    assert "held by: first (pid 7, disconnected) 2.0 MiB. It is due" in text
    assert "programs outside of the broker 3.0 MiB" in explain_wait(job, [job], [], 3 * MIB, 30.0)
    assert explain_wait(job, [job], [], 0, None).endswith("it runs once those before it have ended.")


def test_jobs_hang_up_before_a_process_that_ends_slowly_seems_silent(stage: Stage) -> None:
    """Their bytes count until the process has ended."""
    stage.start_broker()
    joined = BrokerClient(stage.address, name="slow", floor_bytes=50 * MIB, held_bytes=20 * MIB)
    wait_until(lambda: joined.grant is not None)
    _hang_up_at_exit()

    def list_disconnected() -> list[int]:
        reply = stage.try_status()
        return [] if reply is None else [each.held_bytes for each in reply.jobs if each.state == "disconnected"]

    wait_until(lambda: bool(list_disconnected()))
    assert list_disconnected()[0] >= 50 * MIB and not joined._thread.is_alive()


SLOW = """
import time
from elbowroom.sharing.transport import server
carry_out = server.BrokerServer._carry_out
def carry_out_late(self, effects):
    time.sleep(0.1 if effects else 0.0)
    carry_out(self, effects)
server.BrokerServer._carry_out = carry_out_late
"""


def test_a_refused_job_leaves_nothing_with_a_slow_broker(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker answers the JoinRequest of a job that has sent its LeaveNotice, which it must read nevertheless."""
    send = BrokerClient._send

    def send_late(client: BrokerClient, message: LeaveNotice) -> bool:
        time.sleep(0.03)
        return send(client, message)

    monkeypatch.setattr(BrokerClient, "_send", send_late)
    stage.run(SLOW + BROKER, 1e9)
    wait_until(lambda: stage.try_status() is not None)
    for _ in range(3):
        client = BrokerClient(stage.address, name="giant", floor_bytes=200 * MIB, held_bytes=60 * MIB)
        wait_until(lambda client=client: bool(client.refusal))  # type: ignore[misc]
        client.close()
        reply = stage.try_status()
        assert reply is not None and not reply.jobs
