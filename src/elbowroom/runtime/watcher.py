"""Sees what the ops of a running step write in place.

A copy or a replay has what a storage held when it was saved. Autograd without us would find what it holds when it is
needed, and a write through `x.data` between the two is no error. So a step that moves anything is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.hooks.replayable import find_written, iterate_tensors


class Watcher(TorchDispatchMode):
    """Reports writes.

    Args:
        on_write: told of each tensor that an op has just written to in place.

    Attributes:
        paused: while ops are not part of the step.

    Cost: a few microseconds an op.
    """

    def __init__(self, on_write: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_write = on_write
        self.paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        result = self._run(func, args, kwargs)
        for position, name in find_written(func):
            for tensor in iterate_tensors(args[position] if position < len(args) else kwargs.get(name)):
                self._on_write(tensor)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


class Pausable(Protocol):
    """Something that watches ops, unless it is paused."""

    paused: bool


class Hidden:
    """A context in which our own ops are not part of the step: what watches it lets them pass."""

    __slots__ = ("_before", "_watchers")

    def __init__(self, watchers: Sequence[Pausable]) -> None:
        self._watchers = watchers

    def __enter__(self) -> None:
        self._before = [watcher.paused for watcher in self._watchers]
        for watcher in self._watchers:
            watcher.paused = True

    def __exit__(self, *exception: object) -> None:
        for watcher, before in zip(self._watchers, self._before, strict=True):
            watcher.paused = before
