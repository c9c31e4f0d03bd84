"""Locks that are never held by another thread across a fork: in the child, such a thread could not release them."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from typing import Any

PATIENCE_SECONDS = 0.01
"""A fork waits so long for one lock while it holds others."""


class _Locks:
    """All such locks in use. The forking thread acquires them before a fork and releases them after it."""

    def __init__(self) -> None:
        self._locks: weakref.WeakSet[Any] = weakref.WeakSet()
        self._held: list[Any] = []
        os.register_at_fork(before=self._acquire, after_in_parent=self._release, after_in_child=self._release)

    def add(self, lock: Any) -> None:
        self._locks.add(lock)

    def _acquire(self) -> None:
        while not self._acquire_all():
            pass

    def _acquire_all(self) -> bool:
        """Acquire all locks. If another thread holds one for long, which may wait for a second one, acquire none."""
        for lock in list(self._locks):
            if not lock.acquire(timeout=PATIENCE_SECONDS):
                self._release()
                return False
            self._held.append(lock)
        return True

    def _release(self) -> None:
        while self._held:
            self._held.pop().release()


@functools.cache
def _find_locks() -> _Locks:
    """Return the locks of this process. Fork handlers cannot be unregistered, so all locks share them."""
    return _Locks()


def make_lock() -> Any:
    """Return a `threading.RLock` that no other thread holds when this process forks."""
    lock = threading.RLock()
    _find_locks().add(lock)
    return lock
