"""Ops of our own are not part of the step: ways to keep them from whatever watches it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

Hidden = torch._C._DisableTorchDispatch
"""A context in which no dispatch mode sees an op. For plain tensors only: others need theirs to work at all."""


def get_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor without its graph, unseen by modes. Quicker than by a `with`: this is done at each save."""
    hidden = Hidden()  # in force from here on, until it is gone
    try:
        return tensor.detach()
    finally:
        del hidden


@contextlib.contextmanager
def silenced(logger: logging.Logger) -> Iterator[None]:
    """What somebody else logs in here, in this thread, is of no interest."""
    thread = threading.get_ident()

    def is_of_interest(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_of_interest)
    try:
        yield
    finally:
        logger.removeFilter(is_of_interest)


def hide_from_compiler(function: Callable[..., Any]) -> bool:
    """Have torch.compile leave a function alone, and what it calls; whether that could be done.

    Once, where PyTorch's own way is another call around each call.
    """
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    except (AttributeError, ImportError, TypeError):  # none of it is documented
        return False
    return True


class Pausable(Protocol):
    """Something that watches ops, while it is paused by nobody."""

    pauses: int


class Paused:
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


class Below:
    """A context in which ops are seen by the dispatch modes that were entered before `mode`, as those that it saw were.

    Neither by that mode nor by those entered after it, whose work was done when it saw the op.
    """

    __slots__ = ("_mode", "_popped")

    def __init__(self, mode: TorchDispatchMode | None) -> None:
        self._mode = mode
        self._popped: list[TorchDispatchMode] = []

    def __enter__(self) -> None:
        stack = _get_current_dispatch_mode_stack()
        if any(each is self._mode for each in stack):
            while not self._popped or self._popped[-1] is not self._mode:
                self._popped.append(_pop_mode())

    def __exit__(self, *exception: object) -> None:
        while self._popped:
            _push_mode(self._popped.pop())
