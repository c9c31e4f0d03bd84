"""Notices that a process of this machine has ended, for which another one waits."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

GRACE_SECONDS = 5.0
"""How long what waits may take to notice by itself that a process is gone, before this one ends."""

EXIT_CODE = 1

_LOOK_SECONDS = 1.0


def describe_process() -> tuple[str, int]:
    """Return the name of this machine, and the id of this process."""
    return socket.gethostname(), os.getpid()


def has_ended(process: int) -> bool:
    """Tell whether a process of this machine has ended."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except FileNotFoundError:
        return True
    except OSError:
        return False


@contextlib.contextmanager
def ending_if_lost(find_lost: Callable[[], str]) -> Iterator[None]:
    """Return a context in which this process waits, and which ends it if that is in vain: gloo cannot be interrupted.

    Args:
        find_lost: tells, in a thread, who is gone; "" if nobody is.
    """
    is_done = threading.Event()

    def watch() -> None:
        noticed = math.inf
        while not is_done.wait(_LOOK_SECONDS):
            lost = find_lost()
            noticed = min(noticed, time.monotonic()) if lost else math.inf
            if time.monotonic() - noticed > GRACE_SECONDS and not is_done.is_set():
                print(f"elbowroom: {lost}", file=sys.stderr, flush=True)
                os._exit(EXIT_CODE)

    threading.Thread(target=watch, name="elbowroom-ranks-waiting", daemon=True).start()
    try:
        yield
    finally:
        is_done.set()
