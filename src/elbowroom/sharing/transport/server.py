"""Broker process: the core behind a Unix socket, with asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import struct
import time
from collections.abc import Callable

from elbowroom.errors import UsageError
from elbowroom.sharing.broker import Broker, DropClient, Effect, EndProcess, SendMessage
from elbowroom.sharing.lease_table import Remainder
from elbowroom.sharing.messages import LONGEST_MESSAGE_BYTES, RefusalNotice, encode_message
from elbowroom.sharing.transport.address import BrokerAddress
from elbowroom.sharing.transport.processes import count_outside, find_start

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
SECONDS_BETWEEN_MEASUREMENTS = 5.0

MOST_UNREAD_BYTES = 1 << 20
"""A client that leaves more than this unread is dropped."""

_PEER = struct.Struct("3i")


class BrokerServer:
    """Serves one device until it is stopped.

    Args:
        broker: the core.
        address: of the device.
        tell_ready: called once jobs can join.
    """

    def __init__(self, broker: Broker, address: BrokerAddress, tell_ready: Callable[[], None] = lambda: None) -> None:
        self.broker = broker
        self.address = address
        self._tell_ready = tell_ready
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._pids: dict[int, int] = {}  # by client
        self._starts: dict[int, int] = {}  # by process
        self._count = 0
        self._lock = -1
        self._server: asyncio.Server | None = None
        self._written: object = None
        self._is_warned = False
        self._stop = asyncio.Event()
        self._measured = 0.0

    async def serve(self) -> None:
        """Listen until `stop` is called. The socket is gone afterwards; jobs keep their leases.

        Raises:
            UsageError: another broker serves the device, or the folder is not private.
        """
        self.address.prepare()
        self._lock = self.address.take_lock()
        try:
            self._restore()
            self._server = await self._listen()
            self._tell_ready()
            await self._tick_until_stopped()
        finally:
            if self._server is not None:
                self._server.close()
            if self.address.is_locked_by(self._lock):
                with contextlib.suppress(FileNotFoundError):
                    self.address.socket.unlink()
            os.close(self._lock)

    async def _listen(self) -> asyncio.Server:
        with contextlib.suppress(FileNotFoundError):
            self.address.socket.unlink()  # of a broker that was killed
        mask = os.umask(0o177)
        try:
            return await asyncio.start_unix_server(
                self._serve_client, self.address.socket, limit=LONGEST_MESSAGE_BYTES
            )  # fmt: skip
        finally:
            os.umask(mask)

    async def _keep_files(self) -> None:
        """Put back the lock and the socket, if somebody has deleted them.

        Raises:
            UsageError: another broker has taken the device meanwhile.
        """
        if not self.address.is_locked_by(self._lock):
            self.address.prepare()
            former, self._lock = self._lock, self.address.take_lock()
            os.close(former)
            self._written = None
        if not self.address.socket.exists():
            if self._server is not None:
                self._server.close()
            self._server = await self._listen()

    def stop(self) -> None:
        """End `serve`."""
        self._stop.set()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer: socket.socket = writer.get_extra_info("socket")
        pid, uid, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        start = find_start(pid)
        if uid != os.geteuid() or start is None:
            whose = f"belongs to user {uid}" if start is not None else "runs in another container, or has ended"
            text = f"its process {whose}, so the broker cannot watch it"
            writer.write(encode_message(RefusalNotice(sequence=0, text=text)))
            writer.close()
            return
        client = self._count
        self._count += 1
        self._writers[client] = writer
        self._pids[client] = pid
        self._starts.setdefault(pid, start)
        self._carry_out(self.broker.connect(client, pid, time.monotonic()))
        try:
            while client in self._writers:
                try:
                    line = await reader.readline()
                except ValueError:
                    text = f"the message has more than {LONGEST_MESSAGE_BYTES} bytes"
                    self._carry_out(self.broker.refuse(client, text))
                    break
                if not line.endswith(b"\n"):
                    break
                self._carry_out(self.broker.receive_line(client, line, time.monotonic()))
        except OSError as error:
            logger.info("client %d: %s", client, error)
        except asyncio.CancelledError:  # the broker ends; asyncio would print a traceback
            pass
        finally:
            del self._pids[client]
            if self._writers.pop(client, None) is not None:
                self._carry_out(self.broker.disconnect(client, time.monotonic()))
            writer.close()

    async def _tick_until_stopped(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), TICK_SECONDS)
            await self._keep_files()
            self._check_processes()
            self._carry_out(self.broker.tick(time.monotonic()))
            if self.address.device != "cpu" and time.monotonic() - self._measured > SECONDS_BETWEEN_MEASUREMENTS:
                self._measured = time.monotonic()
                card = self.address.card or self.address.device
                outside_bytes = await asyncio.to_thread(count_outside, card, self._list_pids())
                self._carry_out(self.broker.set_outside(outside_bytes, time.monotonic()))

    def _list_pids(self) -> set[int]:
        return {job.pid for job in self.broker.jobs.values()} | {each.pid for each in self.broker.remainders}

    def _check_processes(self) -> None:
        """Give back the bytes of processes that have ended."""
        pids = self._list_pids()
        for pid in pids:
            if (start := find_start(pid)) is None or start != self._starts.setdefault(pid, start):
                self._carry_out(self.broker.end_process(pid, time.monotonic()))
        pids.update(self._pids.values())  # some have not joined yet
        self._starts = {pid: start for pid, start in self._starts.items() if pid in pids}

    def _carry_out(self, effects: list[Effect]) -> None:
        self._write_leases()  # before a job can act on them
        for effect in effects:
            match effect:
                case SendMessage(client, message):
                    writer = self._writers.get(client)
                    if writer is None or writer.is_closing():
                        continue
                    writer.write(encode_message(message))
                    if writer.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
                        logger.warning("client %d does not read its messages and is dropped", client)
                        writer.transport.abort()
                case DropClient(client, reason):
                    logger.warning("client %d is dropped: %s", client, reason)
                    if (writer := self._writers.pop(client, None)) is not None:
                        writer.close()
                case EndProcess(pid):
                    logger.warning("process %d has been silent for too long and is ended", pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    # -- leases on file ---------------------------------------------------------------------------------------------

    def _write_leases(self) -> None:
        jobs = self.broker.jobs.values()
        held = [Remainder(each.pid, each.job, each.name, each.held_bytes) for each in jobs if each.held_bytes]
        held += self.broker.remainders
        if held == self._written:
            return
        rows = [{"pid": each.pid, "start": self._starts.get(each.pid), "job": each.job, "name": each.name,
                 "bytes": each.nbytes} for each in held]  # fmt: skip
        draft = self.address.leases.with_suffix(".draft")
        try:
            draft.write_text(json.dumps(rows))
            draft.replace(self.address.leases)
            self._written = held
        except OSError as error:
            if not self._is_warned:
                logger.warning(
                    "%s cannot be written (%s): a broker that is started after this one was killed will not know of "
                    "the leases until their jobs have joined it", self.address.leases, error.strerror or error,
                )  # fmt: skip
            self._is_warned = True

    def _restore(self) -> None:
        """Count the leases of an earlier broker, as far as their processes live and have not left meanwhile."""
        departures = self.address.list_departures()
        try:
            rows = json.loads(self.address.leases.read_text())
            for row in rows:
                pid = int(row["pid"])
                has_left = self.address.departure(str(row["job"])) in departures
                if (start := find_start(pid)) is not None and start == row["start"] and not has_left:
                    self._starts[pid] = start
                    self.broker.restore(Remainder(pid, str(row["job"]), str(row["name"]), max(0, int(row["bytes"]))))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{self.address.leases} is damaged ({error}). End the jobs of {self.address.device}, and delete it"
            ) from error
        self._write_leases()
        for each in departures:
            each.unlink(missing_ok=True)


async def serve_until_interrupted(server: BrokerServer) -> None:
    """Serve until SIGINT or SIGTERM."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
    await server.serve()
