"""Client: the connection of one job to the broker, in a thread of its own.

The thread keeps the latest grant in an attribute, so a step whose lease does not change looks at one attribute. When
the broker is gone, the job goes on within its last lease, and the thread looks for the next broker.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from typing import Any

from elbowroom.errors import BrokerLost, UsageError
from elbowroom.sharing.messages import (
    LONGEST_MESSAGE_BYTES,
    BadMessage,
    FromBroker,
    FromJob,
    FrontUpdate,
    Heartbeat,
    JoinRequest,
    LeaseConfirmed,
    LeaseGrant,
    LeaveNotice,
    RefusalNotice,
    RestNotice,
    StatusReply,
    StatusRequest,
    Triples,
    WaitNotice,
    decode_message,
    encode_message,
)
from elbowroom.sharing.transport.address import BrokerAddress
from elbowroom.sharing.transport.connections import await_end, interrupt, send_all

SECONDS_BETWEEN_HEARTBEATS = 1.0
SECONDS_BETWEEN_ATTEMPTS = 0.3

LONGEST_SEND_SECONDS = 5.0
"""A broker that takes no message for so long has stopped; the job joins it again when it goes on."""

LONGEST_REPLY_BYTES = 1 << 26

MOST_GRANTS = 100
"""Grants that are remembered until they are confirmed."""

_CLIENTS: weakref.WeakSet[BrokerClient]


class BrokerClient:
    """A job's connection to the broker.

    Args:
        address: of the device's broker.
        name, floor_bytes, held_bytes, weight, priority: as in `JoinRequest`.
        job: as in `JoinRequest`; a new id if not given.

    Attributes:
        grant: the latest lease; None before the first one.
        notice: why the job waits; "" if it does not.
        is_connected: whether there is a broker at present.
        refusal: why the broker refuses the job; "" if it does not.
        on_beat: called by the client's thread after each heartbeat.
    """

    def __init__(
        self, address: BrokerAddress, *, name: str, floor_bytes: int, held_bytes: int, weight: float = 1.0,
        priority: int = 0, job: str | None = None,
    ) -> None:  # fmt: skip
        self.grant: LeaseGrant | None = None
        self.notice = ""
        self.is_connected = False
        self.on_beat: Callable[[], None] | None = None
        self._address = address
        self._join = JoinRequest(
            sequence=0, name=name, job=job or uuid.uuid4().hex, floor_bytes=floor_bytes, held_bytes=held_bytes,
            weight=weight, priority=priority,
        )  # fmt: skip
        self._beat = (0, 0.0, 0)
        self.refusal = ""
        self._sequence = 0
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._is_closed = False
        self._granted: list[LeaseGrant] = []  # by the present broker
        self._socket: socket.socket | None = None
        self._connect()
        _CLIENTS.add(self)
        self._thread = threading.Thread(target=_run, args=(weakref.ref(self),), name="elbowroom-lease", daemon=True)
        self._thread.start()

    # -- calls of the job -------------------------------------------------------------------------------------------

    def wait(self, before: LeaseGrant | None, tell: Callable[[str], None], *, needs_broker: bool = False) -> LeaseGrant:
        """Wait for another lease of at least one byte than `before`, and return it.

        Args:
            before: the lease in force; None for none.
            tell: called with each new explanation.
            needs_broker: whether to give up when the broker is gone.

        Raises:
            UsageError: the broker refuses the job.
            BrokerLost: the broker is gone, and the job needs it.
        """
        told = ""
        while True:
            with self._changed:
                if self.refusal:
                    raise UsageError(f"the broker refuses this job: {self.refusal}")
                if self.grant is not None and self.grant.nbytes and self.grant is not before:
                    return self.grant
                if needs_broker:
                    self.check_broker()
                text = self.notice
                if not self.is_connected:
                    device = self._address.device
                    text = f"the broker of {device} is gone: start another with `elbowroom share --device {device} ...`"
                if text and text != told:
                    told = text
                    tell(told)
                grant = self.grant
                if grant is None or grant is before:
                    self._changed.wait(0.5)
                    continue
            # A lease that came was taken back before the job took it up.
            before = grant
            self.confirm(grant, self._join.held_bytes)

    def check_broker(self) -> None:
        """Check that there is a broker.

        Raises:
            BrokerLost: there is none.
        """
        if not self.is_connected:
            raise BrokerLost(
                f"the broker of {self._address.device} is gone, and without_broker is 'stop': the job ends between two "
                "steps"
            )

    def take(self, grant: LeaseGrant) -> bool:
        """Announce that the job is about to take up a lease. Return False if its broker is gone: then it must not.

        From here on the job joins another broker with the larger of its leases.
        """
        with self._changed:
            if self.grant is not grant:
                return False
            self._update(lease_bytes=max(self._join.lease_bytes, grant.nbytes))
            return True

    def confirm(self, grant: LeaseGrant, held_bytes: int) -> None:
        """Tell the broker that the job keeps within `held_bytes` from now on."""
        with self._changed:
            lease_bytes = max(grant.nbytes, held_bytes) if grant.nbytes else 0
            self._update(lease_bytes=lease_bytes, held_bytes=held_bytes)
            steps, seconds, _ = self._beat
            self._beat = (steps, seconds, 0)
            is_current = grant in self._granted
        if is_current:
            self._send(LeaseConfirmed(sequence=0, epoch=grant.epoch, held_bytes=held_bytes))
        else:  # another broker may have been told of more bytes meanwhile
            interrupt(self._socket)

    def report(self, floor_bytes: int, points: Triples) -> None:
        """Tell the broker the job's front."""
        with self._changed:
            self._update(floor_bytes=floor_bytes, points=points)
        self._send(FrontUpdate(sequence=0, floor_bytes=floor_bytes, points=points))

    def rest(self, rests: bool) -> None:
        """Tell the broker whether the job needs no lease for now."""
        with self._changed:
            self._update(rests=rests)
        self._send(RestNotice(sequence=0, rests=rests))

    def wait_for(self, accepts: Callable[[LeaseGrant], bool], seconds: float) -> LeaseGrant | None:
        """Return the latest lease once it is accepted. None if none was in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.grant is not None and accepts(self.grant), seconds)
            return self.grant if self.grant is not None and accepts(self.grant) else None

    def note_step(self, seconds: float, used_bytes: int) -> None:
        """Count a step. The first one under a lease is told at once, since the broker waits for it."""
        steps, _, most_bytes = self._beat
        self._beat = (steps + 1, seconds, max(most_bytes, used_bytes))
        if self.notice or not steps:
            self.notice = ""
            self._send_heartbeat()

    def note_use(self, used_bytes: int) -> None:
        """Tell the broker at once what the job holds, if that is more than it has said since its last confirmation."""
        steps, seconds, most_bytes = self._beat
        if used_bytes > most_bytes:
            self._beat = (steps, seconds, used_bytes)
            self._send_heartbeat()

    def close(self, *, leaves: bool = True) -> None:
        """Leave the broker. The job holds nothing any more. If there is no broker, a file tells the next one.

        Args:
            leaves: False only to hang up: the job's bytes count as taken until another client joins with its id.
        """
        if self._is_closed:
            return
        self._is_closed = True
        is_own_thread = self._thread is threading.current_thread()
        if not leaves:
            self._hang_up()
            self._thread.join(5.0)
            return
        if self.refusal:
            self._hang_up()  # the broker reads no more
        if self._socket is None:
            if not is_own_thread:
                self._thread.join(5.0)  # it may connect just now
            self._update(floor_bytes=1, held_bytes=0, lease_bytes=0, points=())  # it may have been refused
            with contextlib.suppress(UsageError):
                self._connect()
        is_told = self._send(LeaveNotice(sequence=0))
        await_end(self._socket, LONGEST_SEND_SECONDS)
        self._hang_up()
        if not is_own_thread:
            self._thread.join(5.0)
        if not is_told:
            with contextlib.suppress(OSError):
                self._address.departure(self._join.job).touch(mode=0o600)

    # -- the thread -------------------------------------------------------------------------------------------------

    def poll(self, seconds: float) -> bool:
        """Read messages for some time. Return False once the client is closed."""
        deadline = time.monotonic() + seconds
        if self._socket is None:
            time.sleep(SECONDS_BETWEEN_ATTEMPTS)
            if not self._is_closed and not self.refusal:
                with contextlib.suppress(UsageError):
                    self._connect()
        elif not self._read_until(self._socket, deadline):
            self._hang_up()
        else:
            self._send_heartbeat()
            if self.on_beat is not None:
                self.on_beat()
        return not self._is_closed

    def _read_until(self, connection: socket.socket, deadline: float) -> bool:
        """Read messages until a time. Return False at the end of the connection."""
        pending = b""
        while (left := deadline - time.monotonic()) > 0 or pending:
            try:
                connection.settimeout(max(left, 0.001) if not pending else 5.0)
                piece = connection.recv(LONGEST_MESSAGE_BYTES)
            except TimeoutError:
                return not pending
            except OSError:
                return False
            if not piece:
                return False
            *lines, pending = (pending + piece).split(b"\n")
            try:
                for line in lines:
                    self._receive(decode_message(line, limit_bytes=LONGEST_REPLY_BYTES))
            except BadMessage as error:
                self.refusal = str(error)
                return False
        return True

    def _receive(self, message: FromJob | FromBroker) -> None:
        with self._changed:
            match message:
                case LeaseGrant():
                    self.grant = message
                    self._granted = [*self._granted[-MOST_GRANTS:], message]
                case WaitNotice():
                    self.notice = message.text
                case RefusalNotice():
                    self.refusal = message.text
                case _:
                    raise BadMessage(f"{type(message).__name__} is not for a job")
            self._changed.notify_all()

    def _connect(self) -> None:
        """Connect, and join with the present lease.

        Raises:
            UsageError: there is no broker, or others can open its socket.
        """
        self._address.check()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(LONGEST_SEND_SECONDS)  # its queue may be full
        try:
            connection.connect(os.fspath(self._address.socket))
            with self._sending, self._changed:
                with contextlib.suppress(BrokenPipeError):  # it has refused the job: why, can still be read
                    connection.sendall(encode_message(self._join))
                self._sequence = 1
                self._socket = connection
                self.is_connected = True
                self._changed.notify_all()
        except OSError as error:
            connection.close()
            raise self._address.explain(error) from error

    def _update(self, **fields: Any) -> None:
        """Note what the job will say when it joins again."""
        self._join = dataclasses.replace(self._join, **fields)

    def _hang_up(self) -> None:
        with self._changed:
            interrupt(self._socket)
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            self.is_connected = False
            self.grant = None
            self.notice = ""
            self._granted = []
            self._changed.notify_all()

    def _send_heartbeat(self) -> None:
        steps, seconds, used_bytes = self._beat
        self._send(Heartbeat(sequence=0, steps=steps, step_seconds=seconds, used_bytes=used_bytes))

    def _send(self, message: FrontUpdate | Heartbeat | LeaseConfirmed | RestNotice | LeaveNotice) -> bool:
        """Send a message. Return False if it cannot be sent: joining again makes up for what was lost."""
        with self._sending:
            if (connection := self._socket) is None:
                return False
            line = encode_message(dataclasses.replace(message, sequence=self._sequence))
            self._sequence += 1
            is_sent = False
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile by the thread that reads
                is_sent = send_all(connection, line, LONGEST_SEND_SECONDS)
            if not is_sent:
                interrupt(connection)
            return is_sent

    def close_in_child(self) -> None:
        """Close the copy of the connection that a forked process has."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._is_closed = True


def _run(reference: weakref.ref[BrokerClient]) -> None:
    while (client := reference()) is not None and client.poll(SECONDS_BETWEEN_HEARTBEATS):
        del client


def _close_in_child() -> None:
    for client in list(_CLIENTS):
        client.close_in_child()


def _hang_up_at_exit() -> None:
    """Hang up: the threads end before the process does, whose bytes count until then, and it would seem silent."""
    for client in list(_CLIENTS):
        client.close(leaves=False)


_CLIENTS = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)
atexit.register(_hang_up_at_exit)


def ask_status(address: BrokerAddress) -> StatusReply:
    """Return the state of a device's broker.

    Raises:
        UsageError: there is no broker, it does not answer, or it is of another version.
    """
    address.check()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(5.0)
        try:
            connection.connect(os.fspath(address.socket))
            connection.sendall(encode_message(StatusRequest(sequence=0)))
            with connection.makefile("rb") as lines:
                reply = decode_message(lines.readline(LONGEST_REPLY_BYTES), limit_bytes=LONGEST_REPLY_BYTES)
        except (OSError, BadMessage) as error:
            raise address.explain(error) from error
    if not isinstance(reply, StatusReply):
        raise UsageError(f"the broker of {address.device} refuses: {reply}")
    return reply
