"""Functions on the sockets that join jobs and brokers."""

from __future__ import annotations

import contextlib
import select
import socket


def send_all(connection: socket.socket, line: bytes, seconds: float) -> bool:
    """Send a line. Return False if the other side takes nothing for so long.

    The thread that reads sets other timeouts on the same socket, so this one waits by itself.
    """
    can_send = select.poll()
    can_send.register(connection, select.POLLOUT)
    while line:
        if not can_send.poll(seconds * 1000):
            return False
        line = line[connection.send(line, socket.MSG_DONTWAIT) :]
    return True


def interrupt(connection: socket.socket | None) -> None:
    """End a connection, which wakes the thread that reads: it joins again."""
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def await_end(connection: socket.socket | None, seconds: float) -> None:
    """Send no more, and wait until the other side has read all and has ended the connection.

    A broker that writes to a connection which is closed meanwhile does not read what is left in it.
    """
    if connection is not None:
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile by the thread that reads
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(seconds)
            while connection.recv(1 << 16):
                pass
