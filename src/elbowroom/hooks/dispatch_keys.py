"""Contexts that hide Elbowroom's own ops from the step's watchers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch

_WATCHED_KEY = torch._C._dispatch_key_parse("Fake")  # see `native/watched_ops.cpp`
_WATCHED = torch._C.DispatchKeySet(_WATCHED_KEY)
_PYTHON = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
_SNAPSHOT = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)

Unwatched = functools.partial(torch._C._ExcludeDispatchKeyGuard, _WATCHED)
"""Context in which watchers see no ops; dispatch modes still do."""

Hidden = functools.partial(torch._C._ExcludeDispatchKeyGuard, _WATCHED | _PYTHON | _SNAPSHOT)
"""Context in which neither watchers nor dispatch modes see ops. For plain tensors only: others need their modes."""


@functools.cache
def pass_higher_order_ops() -> None:
    """Have PyTorch's higher-order operators pass over the key of the watchers, which see the ops that they call.

    They look for a kernel in Python by each key that is on, and fail without one; fallbacks in C++ are not theirs.
    """
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_WATCHED_KEY)  # of those still to be defined
    for operator in list(torch._ops._higher_order_ops.values()):
        operator.fallthrough(_WATCHED_KEY)


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
