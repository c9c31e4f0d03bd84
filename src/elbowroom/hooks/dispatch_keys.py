"""Ops of our own are not part of the step: ways to keep them from whatever watches it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch

_WATCHED = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("Fake"))  # see `native/watched_ops.cpp`
_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
_SNAPSHOT = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)

Unwatched = functools.partial(torch._C._ExcludeDispatchKeyGuard, _WATCHED)
"""A context in which no watcher sees an op; dispatch modes do."""

Hidden = functools.partial(torch._C._ExcludeDispatchKeyGuard, _WATCHED | _PYTHON | _SNAPSHOT)
"""A context in which neither watchers nor dispatch modes see an op. For plain tensors only: others need their modes to
work at all."""


class Pausable(Protocol):
    """Something that watches ops, while it is paused by nobody."""

    pauses: int


class PausedWatchers:
    """A context in which some watchers let ops pass, which other modes still see."""

    __slots__ = ("_watchers",)

    def __init__(self, watchers: Sequence[Pausable]) -> None:
        self._watchers = list(watchers)

    def __enter__(self) -> None:
        for watcher in self._watchers:
            watcher.pauses += 1

    def __exit__(self, *exception: object) -> None:
        for watcher in self._watchers:
            watcher.pauses -= 1
