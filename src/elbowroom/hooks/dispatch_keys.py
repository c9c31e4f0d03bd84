"""Contexts that hide Elbowroom's own ops from the step's watchers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch

_WATCHED = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("Fake"))  # see `native/watched_ops.cpp`
_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
_SNAPSHOT = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)

Unwatched = functools.partial(torch._C._ExcludeDispatchKeyGuard, _WATCHED)
"""Context in which watchers see no ops; dispatch modes still do."""

Hidden = functools.partial(torch._C._ExcludeDispatchKeyGuard, _WATCHED | _PYTHON | _SNAPSHOT)
"""Context in which neither watchers nor dispatch modes see ops. For plain tensors only: others need their modes."""


class Pausable(Protocol):
    """Watcher that ignores ops while `pauses` is above 0."""

    pauses: int


class PausedWatchers:
    """Context that pauses the given watchers; dispatch modes still see ops."""

    __slots__ = ("_watchers",)

    def __init__(self, watchers: Sequence[Pausable]) -> None:
        self._watchers = list(watchers)

    def __enter__(self) -> None:
        for watcher in self._watchers:
            watcher.pauses += 1

    def __exit__(self, *exception: object) -> None:
        for watcher in self._watchers:
            watcher.pauses -= 1
