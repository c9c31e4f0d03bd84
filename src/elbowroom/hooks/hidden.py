"""Ops of our own are not part of the step: two ways to keep them from whatever watches it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

Hidden = torch._C._DisableTorchDispatch
"""A context in which no dispatch mode sees an op. For plain tensors only: others need theirs to work at all."""


class Pausable(Protocol):
    """Something that watches ops, while it is paused by nobody."""

    pauses: int


class Paused:
    """A context in which some watchers let ops pass, which other modes still see."""

    __slots__ = ("_watchers",)

    def __init__(self, watchers: Sequence[Pausable]) -> None:
        self._watchers = watchers

    def __enter__(self) -> None:
        for watcher in self._watchers:
            watcher.pauses += 1

    def __exit__(self, *exception: object) -> None:
        for watcher in self._watchers:
            watcher.pauses -= 1
